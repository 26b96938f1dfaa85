"""Recipes with every key set to what it is not."""

import pytest

from polybasic.recipes.schema.loading import known_keys, load_recipe
from polybasic.recipes.schema.recipe import Recipe
from tests.attacks import outcomes

KEYS = [".".join(key) for key in known_keys(Recipe)]
VALUES = [
    *(".inf", "-.inf", ".nan", "1e300", "-1", "-100000000000000000000000000", "2.5", "true"),
    *("''", "[1, 1]", "[]", "{a: 1}", "1" + "0" * 5000, "x" * 301, '"\\0"', '"\\ud800"', "&a 1"),
]
REFUSED = [
    *("train.learning_rate=.inf", "train.learning_rate=1e300", "train.adam_betas=[1, 1]"),
    *("train.token_loss_weight=.inf", "plan.temperature=.inf", "plan.temperature=1e-30"),
    *("bench.temperature=.nan", "plan.seed=-100000000000000000000000000", "bench.seed=2.5"),
    *("plan.flush_length=100000000000000000000", "train.draft_vocab_size=100000000000"),
    *("train.num_steps=true", "quantize.distill.learning_rate=.inf", "plan.max_seconds=.inf"),
    *("data.max_tokens=10000000000", "train.intermediate_size=-5", f"name={'x' * 301}"),
    *("data.regenerate.endpoint=file:///etc/passwd", "data.regenerate.endpoint=localhost:8000"),
    *("data.regenerate.endpoint=http://me:secret@host/v1", "data.regenerate.endpoint=http://"),
    *("data.regenerate.endpoint=http://host/v1?key=1", "data.regenerate.endpoint=http://h:x/v1"),
    *('target.model="a\\0b"', 'description="\\ud800"'),
]


@pytest.mark.parametrize("override", REFUSED, ids=lambda override: override[:60])
def test_a_recipe_is_refused_before_anything_is_written(override: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = outcomes.of_command("run", "base", override)
    assert line is not None
    assert override.partition("=")[0] in line
    assert "secret" not in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.proof), len(VALUES) // 2])
@pytest.mark.parametrize("value", VALUES, ids=lambda value: value[:20])
def test_every_key_reads_or_refuses_every_value(value: str, step: int) -> None:
    refused, keys = 0, KEYS[VALUES.index(value) % step :: step]
    for key in keys:
        try:
            line = outcomes.of_call(lambda key=key: load_recipe("base", [f"{key}={value}"]))
        except Exception as error:
            raise AssertionError(f"{key}={value[:40]}") from error
        refused += line is not None
    assert refused > len(keys) / 3
