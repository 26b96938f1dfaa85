"""The schema: defaults, refusals, and that it describes itself."""

import json

import pytest
import yaml
from pydantic import ValidationError

from polybasic.chain.base.errors import UserError
from polybasic.recipes.pipeline.run import as_yaml
from polybasic.recipes.schema.loading import known_keys
from polybasic.recipes.schema.recipe import Recipe

NUM_SHORT_STEPS = {"num_steps": 10, "warmup_steps": 1}


def recipe(**sections: object) -> Recipe:
    return Recipe.model_validate({"name": "a", "train": NUM_SHORT_STEPS, **sections})


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        recipe().seed = 3  # type: ignore[misc]


def test_unknown_keys_are_refused_in_every_section() -> None:
    sections = {key[0] for key in known_keys(Recipe) if len(key) > 1}
    assert {"target", "small", "plan"} <= sections
    for name in sections:
        with pytest.raises(ValidationError, match="extra_forbidden"):
            recipe(**{name: {"surely_unknown": 1}})


def test_resolved_recipe_round_trips() -> None:
    given = recipe(seed=7, bench={"systems": ["target", "eagle2"]})
    assert Recipe.model_validate(yaml.safe_load(as_yaml(given))) == given


def test_schema_is_json_and_describes_sections() -> None:
    schema = json.loads(json.dumps(Recipe.model_json_schema()))
    assert schema["additionalProperties"] is False
    assert all("description" in part for part in schema["properties"].values())


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"bench": {"systems": ["eagle2"]}}, "no baseline: bench.systems = eagle2"),
        (
            {"small": {"quantize": False}, "train": {"features_from": "intermediate"}},
            "no 4-bit copy of the smaller model to take features from",
        ),
        (
            {"small": {}, "train": {"kind": "early_exit", "feature_loss_weight": 0}},
            "early exit of a model that the chain does not have: train.kind = early_exit, small",
        ),
        (
            {"small": {}, "train": {"kind": "steering", "feature_loss_weight": 0}},
            "no model to steer: train.kind = steering without a smaller model that drafts",
        ),
        (
            {"quantize": None, "train": {"features_from": "intermediate"}},
            "no 4-bit copy of the target to take features from",
        ),
        (
            {"target": {"model": "m"}, "draft": {"model": "a/b"}, "train": {"kind": "none"}},
            "a ready head for a chain without heads: draft.model = a/b, train.kind = none",
        ),
        (
            {"plan": {"prompts": "heldout", "num_prompts_per_task": 5}},
            r"too few held-out .*: data.num_heldout = 48, 60 prompts \(6 x plan",
        ),
    ],
)
def test_sections_that_contradict_each_other_are_refused(sections: dict, told: str) -> None:
    with pytest.raises(UserError, match=told):
        recipe(**sections)


@pytest.mark.parametrize(
    ("train", "told"),
    [
        ({"kind": "eagle3"}, "a head of kind eagle3 has no feature loss"),
        ({"kind": "medusa"}, "a head of kind medusa has no feature loss"),
        (
            {"kind": "hydra", "feature_loss_weight": 0, "intermediate_size": 256},
            "a head of kind hydra has no MLP",
        ),
        ({"feature_layers": [1, 2, 3]}, "read by a head of kind eagle3"),
        ({"normed_features": True}, "normed_features is of a head of kind eagle3"),
        ({"kind": "block", "normed_features": True}, "normed_features is of a head of kind eagle3"),
        ({"feature_loss_weight": 0, "token_loss_weight": 0}, "nothing would be learned"),
        ({"features_folder": "f"}, "features_folder is of offline features"),
        ({"save_every_steps": 40, "keep_every_steps": 100}, "must be a multiple of save_every"),
        ({"warmup_steps": 10, "num_steps": 10}, "must be below num_steps"),
        ({"draft_vocab_size": 63}, "63 is no size: give a whole number of tokens, 64 or more"),
        ({"draft_vocab_size": 1.5}, "1.5 is no size: .* or a share of the answers' tokens"),
        ({"draft_vocab_size": 0}, "0 is no size"),
    ],
)
def test_training_that_contradicts_itself_is_refused(train: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        recipe(train=train)


def test_what_the_target_asks_itself_it_answers_here() -> None:
    answered = {"temperature": 0.0}
    assert recipe(data={"self_prompted": 7, "regenerate": answered}).data.self_prompted == 7
    elsewhere = answered | {"endpoint": "http://localhost:8000/v1"}
    for regenerate in (None, elsewhere):
        with pytest.raises(ValidationError, match="self_prompted 7 needs answers through this"):
            recipe(data={"self_prompted": 7, "regenerate": regenerate})


def test_a_draft_vocabulary_is_a_number_or_a_share() -> None:
    for given, kept in ((64, 64), (512.0, 512), (0.98, 0.98), (None, None)):
        found = recipe(train={"draft_vocab_size": given}).train
        assert found.draft_vocab_size == kept
        assert type(found.draft_vocab_size) is type(kept)
        assert type(found).model_validate_json(found.model_dump_json()) == found


def test_what_belongs_to_a_ready_made_model_is_taken_with_one() -> None:
    given = recipe(
        target={"model": "a/b", "adapter": "c/d", "chat_template": "{{ 1 }}"},
        draft={"model": "e/f", "adapt": "lora"},
        plan={"prompts": "heldout", "num_prompts_per_task": 4},
    )
    assert given.draft.lora.rank == 16


def test_a_smaller_model_keeps_its_defaults_where_one_key_is_given() -> None:
    small = recipe(small={"model": "a/b"}).small
    assert small is not None
    assert (small.quantize, small.has_head) == (True, True)
    assert recipe().small is None


@pytest.mark.parametrize("changes", [{"role": "drafter"}, {"train_head": False}])
def test_drafters_and_models_told_so_have_no_head(changes: dict) -> None:
    small = recipe(small=changes).small
    assert small is not None
    assert not small.has_head
