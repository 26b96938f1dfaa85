"""A head for each family of targets: trained end to end, and the same head when it is served."""

import json

import pytest
import torch
from safetensors.torch import load_file

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.kernels.rows import consecutive_rows
from polybasic.chain.model.loading import load_decoder, load_head
from polybasic.train.features.target import load_target
from polybasic.train.head.start import new_head
from polybasic.train.run.training import train_head
from polybasic.train.settings import DataSettings, HeadSettings
from tests.checkpoints import DISTINCT, FAMILIES, write_family
from tests.train.counting import write_counting

ROWS = 30
DATA = DataSettings(num_heldout=4, max_tokens=400)
SETTINGS = HeadSettings(
    num_steps=2,
    warmup_steps=1,
    batch_size=2,
    learning_rate=1e-3,
    dtype="float32",
    eval_every_steps=2,
    eval_answer_tokens=6,
    eval_tree_depth=2,
    eval_tree_top_k=2,
    eval_tree_rows=4,
)
CPU = torch.device("cpu")
YARN = {
    "rope_parameters": {
        "rope_theta": 1e4,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
}


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    return write_counting(path, "Count on from {}, please.", 4, 5)


def trained(folder, family, conversations, settings=SETTINGS, **changes):
    write_family(folder / "target", family, dtype=torch.float32, **changes)
    summary = train_head(
        folder / "target", conversations, DATA, settings, seed=0, out=folder / "draft"
    )
    return folder / "target", folder / "draft", summary


@torch.no_grad()
def in_training(target_folder, draft, token_ids, features):
    target = load_target(target_folder, CPU)
    head = new_head(target.head_shape(SETTINGS), target.embedding, SETTINGS, 0, draft, None)
    output, _ = head(token_ids[None], features[None], torch.arange(len(token_ids)))
    return output[0], target.lm_head(output[0])


@torch.no_grad()
def when_served(target_folder, draft, token_ids, features):
    target = load_decoder(read_config(target_folder), torch.float32, CPU, 256)
    head = load_head(read_config(draft), target, 256)
    config = head.config
    cache = torch.zeros(2 * config.num_kv_heads, 256, config.head_dim)
    read = [consecutive_rows(0, len(token_ids))]
    states = head.forward(token_ids, [[cache]], read, features)
    return states, target.logits(states)


def rows():
    torch.manual_seed(0)
    return torch.randint(250, (ROWS,)), torch.randn(ROWS, 128)


@pytest.mark.parametrize("family", DISTINCT)
def test_head_of_a_family_is_the_same_in_training_and_when_served(family, conversations, tmp_path):
    target, draft, summary = trained(tmp_path, family, conversations)
    assert summary["steps"] == summary["best_step"] == 2
    assert 1 <= summary["simulated_accepted_length"] <= 3
    stored = load_file(draft / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(stored, load_target(target, CPU).embedding), "the raw table"
    expected, expected_logits = in_training(target, draft, *rows())
    states, logits = when_served(target, draft, *rows())
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-5, atol=1e-4)


OTHER_KINDS = [
    ("llama3", "eagle3", None),
    ("qwen2", "eagle3", 64),
    ("gemma2", "eagle3", 64),
    ("gemma3", "eagle3", 64),
    ("gemma2", "eagle2", 64),
]


@pytest.mark.parametrize(("family", "kind", "size"), OTHER_KINDS)
def test_other_kinds_are_the_same_in_training_and_when_served(
    family, kind, size, conversations, tmp_path
):
    """From token ids to the draft's logits, through the target's pass on either side."""
    changes = {"kind": kind, "draft_vocab_size": size}
    if kind == "eagle3":
        changes["feature_loss_weight"] = 0.0
    settings = HeadSettings(**SETTINGS.model_dump() | changes)
    folder, draft, summary = trained(tmp_path, family, conversations, settings)
    assert 1 <= summary["simulated_accepted_length"] <= 3
    token_ids = rows()[0]
    target = load_target(folder, CPU)
    shape = target.head_shape(settings)
    head = new_head(shape, target.embedding, settings, 0, draft, None)
    features = target.features(token_ids[None, :-1], feature_layers=shape.feature_layers)
    with torch.no_grad():
        inputs = head.fuse(head.source(features))
        output, _ = head(token_ids[None, 1:], inputs, torch.arange(ROWS - 1))
        expected = head.projection(target.lm_head)(head.projected(output[0]))
    decoder = load_decoder(read_config(folder), torch.float32, CPU, 256)
    served = load_head(read_config(draft), decoder, 256)
    weights, seen = served.weights, [consecutive_rows(0, ROWS - 1)]
    caches = [torch.zeros(4, 256, decoder.config.head_dim) for _ in decoder.weights.layers]
    layers = weights.feature_layers
    states = decoder.forward(token_ids[:-1], [caches], seen, feature_layers=layers)
    cache = torch.zeros(2 * served.config.num_kv_heads, 256, served.config.head_dim)
    read = served.features(weights.select_inputs(states))
    logits = served.logits(served.forward(token_ids[1:], [[cache]], seen, read))
    assert logits.shape == (ROWS - 1, size or target.embedding.shape[0])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    if size is None:
        assert weights.draft_token_ids is head.draft_token_ids is None
    else:
        assert torch.equal(weights.draft_token_ids, head.draft_token_ids)


@pytest.mark.parametrize(("family", "changes"), [("gemma3", {}), ("mistral", YARN)])
def test_rotary_scaling_of_the_target_is_the_heads(family, changes, conversations, tmp_path):
    target, draft, _ = trained(tmp_path, family, conversations, **changes)
    path = draft / "config.json"
    config = json.loads(path.read_text())
    expected, _ = in_training(target, draft, *rows())
    assert config["rope_scaling"]["rope_type"] in ("linear", "yarn")
    path.write_text(json.dumps(config | {"rope_scaling": None}))
    states, _ = when_served(target, draft, *rows())
    assert not torch.allclose(states, expected, rtol=1e-3, atol=1e-3), "scaling takes part"
    path.write_text(json.dumps(config))
    states, _ = when_served(target, draft, *rows())
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)


def test_embedding_and_lm_head_are_the_models_own_tensors(tmp_path):
    for family, is_tied in (("qwen3", False), ("llama32", True)):
        write_family(tmp_path / family, family)
        target = load_target(tmp_path / family, CPU)
        model = target.model
        assert target.embedding is model.get_input_embeddings().weight
        assert target.lm_head.weight is model.get_output_embeddings().weight
        assert (target.embedding is target.lm_head.weight) == is_tied


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_what_lm_head_reads(family, tmp_path):
    write_family(tmp_path / family, family, dtype=torch.float32)
    target = load_target(tmp_path / family, CPU)
    token_ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        expected = target.model(token_ids).logits
    features = target.features(token_ids)
    torch.testing.assert_close(target.lm_head(features.states), expected)
    assert features.layers is None
    assert (target.lm_head.softcap is not None) == (family == "gemma2")


DOCUMENTS = torch.tensor([[0] * 30 + [1] * 30, [0] * 40 + [1] * 12 + [-1] * 8])
PARTS = [(0, 0, 30), (0, 30, 60), (1, 0, 40), (1, 40, 52)]
"""Row, first and last place of each conversation, two of them longer than the window of 24."""


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_of_layers_and_packed_conversations(family, tmp_path):
    write_family(tmp_path / family, family, dtype=torch.float32)
    target = load_target(tmp_path / family, CPU)
    token_ids = torch.randint(250, (2, 60), generator=torch.Generator().manual_seed(0))
    layers = (0, 1, 2)
    packed = target.features(token_ids, DOCUMENTS, layers)
    unaware = target.features(token_ids, feature_layers=layers)
    for row, start, end in PARTS:
        conversation = token_ids[row : row + 1, start:end]
        with torch.no_grad():
            model = target.model.model(conversation, output_hidden_states=True)
        alone = target.features(conversation, feature_layers=layers)
        assert torch.equal(alone.states, model.last_hidden_state)
        assert torch.equal(alone.layers, torch.cat(model.hidden_states[:3], dim=-1))
        for name in ("states", "layers"):
            found, expected = (getattr(each, name) for each in (packed, alone))
            torch.testing.assert_close(found[row, start:end], expected[0], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(packed.states[0, 40], unaware.states[0, 40], atol=1e-2)


def test_which_layers_an_eagle3_head_reads(tmp_path):
    def chosen(**changes):
        settings = HeadSettings(kind="eagle3", feature_loss_weight=0, **changes)
        return target.head_shape(settings).feature_layers

    write_family(tmp_path / "small", "llama3")
    target = load_target(tmp_path / "small", CPU)
    assert chosen() == (0, 1, 2)
    assert chosen(feature_layers=(0, 0, 2)) == (0, 0, 2)
    for wrong in ((0, 1, 3), (2, 1, 0)):
        with pytest.raises(UserError, match=r"feature_layers \[.*\] of 3 layers; name three of 0"):
            chosen(feature_layers=wrong)
    assert target.head_shape(SETTINGS).feature_layers is None
    for num_layers, expected in ((6, (0, 3, 5)), (7, (2, 3, 4)), (32, (2, 16, 29))):
        target.model.config.num_hidden_layers = num_layers
        assert chosen() == expected


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_logits_that_are_not_of_lm_head_alone_are_refused(tmp_path):
    from transformers import GraniteConfig, GraniteForCausalLM

    write_family(tmp_path / "llama3", "llama3")
    for scale in (1.0, 8.0):
        torch.manual_seed(0)
        config = GraniteConfig(
            vocab_size=320,
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            logits_scaling=scale,
            initializer_range=0.2,
        )
        GraniteForCausalLM(config).save_pretrained(tmp_path / "granite")
        if scale == 1.0:
            load_target(tmp_path / "granite", CPU, tmp_path / "llama3")
        else:
            with pytest.raises(UserError, match=r"Llama family's layout: .*granite"):
                load_target(tmp_path / "granite", CPU, tmp_path / "llama3")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama2", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        ("phi3", {"partial_rotary_factor": 0.5}),
    ],
)
def test_rotary_scaling_that_heads_lack_is_refused(family, changes, tmp_path):
    write_family(tmp_path / family, family)
    edit_config(tmp_path / family, **changes)
    with pytest.raises(UserError, match=r"unsupported rotary scaling: .*supported: default"):
        load_target(tmp_path / family, CPU)


def test_tokenizer_of_another_folder(tmp_path):
    write_family(tmp_path / "llama3", "llama3")
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in (tmp_path / "llama3").iterdir():
        if not path.name.startswith(("token", "chat", "special", "vocab", "merges")):
            (bare / path.name).write_bytes(path.read_bytes())
    with pytest.raises(UserError, match=r"cannot load the target's tokenizer: .*bare"):
        load_target(bare, CPU)
    assert load_target(bare, CPU, tmp_path / "llama3").tokenizer.chat_template
