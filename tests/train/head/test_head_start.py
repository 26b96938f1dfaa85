"""Where heads come from: random, a ready head with its own shape and biases, a LoRA on one."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.draft_vocabulary import draft_tables
from polybasic.train.features.lm_head import LmHead
from polybasic.train.head.eagle2 import Eagle2Head
from polybasic.train.head.eagle3 import Eagle3Head
from polybasic.train.head.files import head_config
from polybasic.train.head.start import new_head, trained_weights
from polybasic.train.settings import HeadSettings, LoraSettings
from tests.train.counting import SMALL_SHAPE

LINEAR = {"rope_type": "linear", "rope_theta": 700.0, "factor": 4.0}
READY = replace(
    SMALL_SHAPE,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=40,
    rope=LINEAR,
    has_fc_bias=True,
    has_qkv_bias=True,
)
SETTINGS = HeadSettings(num_steps=4, warmup_steps=1, dtype="float32")
LORA = LoraSettings(rank=3, alpha=6.0)
MATRICES = {
    "fc.weight",
    *(f"layers.0.self_attn.{each}_proj.weight" for each in "qkvo"),
    *(f"layers.0.mlp.{each}_proj.weight" for each in ("gate", "up", "down")),
}
BIASES = {"fc.bias", *(f"layers.0.self_attn.{each}_proj.bias" for each in "qkv")}
NORM = "layers.0.post_attention_layernorm.weight"


@pytest.fixture
def embedding():
    torch.manual_seed(1)
    return torch.randn(50, 32)


@pytest.fixture
def ready(tmp_path):
    """Folder of a head with a shape of its own and with biases."""
    return write_head(tmp_path / "ready", READY)


def write_head(folder, shape, draft_token_ids=None, **changes):
    torch.manual_seed(2)
    head_class = Eagle3Head if shape.kind == "eagle3" else Eagle2Head
    head = head_class(shape, draft_token_ids=draft_token_ids)
    folder.mkdir()
    config = head_config(shape, "0" * 64, "float32")
    (folder / "config.json").write_text(json.dumps(config | changes))
    weights = {name: 0.2 * torch.randn_like(each) for name, each in head.state_dict().items()}
    if draft_token_ids is not None:
        weights |= draft_tables(draft_token_ids, shape.vocab_size)
    save_file(weights, folder / "model.safetensors")
    return folder


def change(folder, **changed):
    weights = load_file(folder / "model.safetensors")
    weights |= {name.replace("__", "."): tensor for name, tensor in changed.items()}
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")


def run(head, seed=3):
    torch.manual_seed(seed)
    features = torch.randn(2, 9, 32)
    return head.unroll(torch.randint(50, (2, 9)), features, 2)[1]


def test_random_head_is_a_function_of_the_seed_and_shares_the_embedding(embedding):
    head, same, other = (
        new_head(SMALL_SHAPE, embedding, SETTINGS, seed, None, None) for seed in (0, 0, 1)
    )
    assert head.embed_tokens.weight.data_ptr() == embedding.data_ptr()
    assert torch.equal(head.fc.weight, same.fc.weight)
    assert not torch.equal(head.fc.weight, other.fc.weight)
    settings = SETTINGS.model_copy(update={"dtype": "bfloat16"})
    half = new_head(SMALL_SHAPE, embedding, settings, 0, None, None)
    assert half.embed_tokens.weight.dtype == torch.bfloat16
    assert half.fc.weight.dtype == torch.float32, "masters are made of these"
    assert set(trained_weights(head)) == {*MATRICES, NORM}


def test_ready_head_keeps_its_weights_shape_and_biases(embedding, ready):
    head = new_head(SMALL_SHAPE, embedding, SETTINGS, 0, ready, None)
    assert head.shape == READY
    assert torch.equal(head.embed_tokens.weight, embedding), "the target's, not the file's"
    stored = load_file(ready / "model.safetensors")
    del stored["embed_tokens.weight"]
    weights = trained_weights(head)
    assert weights.keys() == stored.keys() == {*MATRICES, *BIASES, NORM}
    for name, tensor in stored.items():
        assert torch.equal(weights[name], tensor), name
    trainable = {name for name, each in head.named_parameters() if each.requires_grad}
    assert trainable == stored.keys()
    before = run(head)
    with torch.no_grad():
        head.layers[0].self_attn.q_proj.bias.zero_()
    assert not torch.allclose(run(head), before, atol=1e-3), "biases take part"


def test_biases_of_zeros_are_none(embedding, ready):
    change(ready, **{name: torch.zeros_like(load(ready, name)) for name in BIASES})
    head = new_head(SMALL_SHAPE, embedding, SETTINGS, 0, ready, None)
    assert not head.shape.has_fc_bias
    assert not head.shape.has_qkv_bias
    assert set(trained_weights(head)) == {*MATRICES, NORM}


def load(folder, name):
    return load_file(folder / "model.safetensors")[name]


def test_fresh_lora_changes_nothing_and_alone_is_trained(embedding, ready):
    plain = new_head(SMALL_SHAPE, embedding, SETTINGS, 0, ready, None)
    adapted = new_head(SMALL_SHAPE, embedding, SETTINGS, 0, ready, LORA)
    torch.testing.assert_close(run(adapted), run(plain), rtol=0, atol=0)
    trainable = {name for name, each in adapted.named_parameters() if each.requires_grad}
    assert len(trainable) == 2 * len(MATRICES)
    assert all(".lora_A." in name or ".lora_B." in name for name in trainable)
    frozen, expected = trained_weights(adapted), trained_weights(plain)
    assert frozen.keys() == expected.keys()
    assert all(torch.equal(frozen[name], expected[name]) for name in expected)
    again = new_head(SMALL_SHAPE, embedding, SETTINGS, 0, ready, LORA)
    assert torch.equal(again.fc.lora_A["default"].weight, adapted.fc.lora_A["default"].weight)


def test_merged_lora_is_the_adapted_head(embedding, ready):
    adapted = new_head(SMALL_SHAPE, embedding, SETTINGS, 0, ready, LORA)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.05)
    merged = Eagle2Head(READY, embedding)
    merged.load_state_dict(trained_weights(adapted), strict=False)
    # sums of float32 in another order, which depends on the processor
    torch.testing.assert_close(run(merged), run(adapted), rtol=1e-4, atol=1e-4)
    plain = new_head(SMALL_SHAPE, embedding, SETTINGS, 0, ready, None)
    assert not torch.allclose(run(plain), run(adapted), atol=1e-2)
    for name, tensor in trained_weights(plain).items():
        difference = trained_weights(adapted)[name] - tensor
        rank = torch.linalg.matrix_rank(difference, rtol=1e-4) if name in MATRICES else 0
        assert rank == (3 if name in MATRICES else 0), name
        assert bool(difference.any()) == (name in MATRICES), name


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hidden_size": 64}, "does not fit its target: .* hidden_size 32, wanted 64"),
        ({"vocab_size": 51}, "does not fit its target: .* vocab_size 50, wanted 51"),
    ],
)
def test_head_for_another_target_is_refused(changes, match, embedding, ready):
    with pytest.raises(UserError, match=match):
        new_head(replace(SMALL_SHAPE, **changes), embedding, SETTINGS, 0, ready, None)


def test_wanted_mlp_size_must_be_the_ready_heads(embedding, ready):
    for size, fits in ((40, True), (48, False)):
        settings = SETTINGS.model_copy(update={"intermediate_size": size})
        if fits:
            assert new_head(SMALL_SHAPE, embedding, settings, 0, ready, None).shape == READY
        else:
            with pytest.raises(UserError, match="intermediate_size 40, wanted 48"):
                new_head(SMALL_SHAPE, embedding, settings, 0, ready, None)


def test_other_activation_is_refused(embedding, tmp_path):
    folder = write_head(tmp_path / "gelu", READY, hidden_act="gelu_pytorch_tanh")
    with pytest.raises(UserError, match="activation gelu_pytorch_tanh, wanted silu"):
        new_head(SMALL_SHAPE, embedding, SETTINGS, 0, folder, None)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"fc__weight": None}, "weight missing: fc.weight in"),
        ({"layers__0__self_attn__k_proj__bias": None}, "weight missing: .*k_proj.bias in"),
        ({"midlayer__norm__weight": torch.ones(3)}, "no EAGLE-2 head has: midlayer.norm.weight"),
        ({"fc__weight": torch.ones(32, 96)}, r"config.json differ: fc.weight .* \[32, 96\], not"),
    ],
)
def test_other_weights_are_refused(changed, match, embedding, ready):
    change(ready, **changed)
    with pytest.raises(UserError, match=match):
        new_head(SMALL_SHAPE, embedding, SETTINGS, 0, ready, None)


SHAPE3 = replace(SMALL_SHAPE, kind="eagle3", feature_layers=(0, 2, 3))
SETTINGS3 = HeadSettings(
    kind="eagle3", feature_loss_weight=0, num_steps=4, warmup_steps=1, dtype="float32"
)
DRAFTED = torch.tensor([0, 3, 7, 20, 49])
MATRICES3 = {
    "fc.weight",
    *(f"midlayer.self_attn.{each}_proj.weight" for each in "qkvo"),
    *(f"midlayer.mlp.{each}_proj.weight" for each in ("gate", "up", "down")),
}
NORMS3 = {
    "norm.weight",
    *(f"midlayer.{each}.weight" for each in ("hidden_norm", "input_layernorm")),
    "midlayer.post_attention_layernorm.weight",
}


def eagle3(start=None, lora=None, embedding=None, **options):
    embedding = torch.zeros(50, 32) if embedding is None else embedding
    return new_head(SHAPE3, embedding, SETTINGS3, 0, start, lora, **options)


def test_random_eagle3_head_starts_from_the_verifiers_projection():
    lm_head = LmHead(torch.randn(50, 32))
    whole = eagle3(lm_head=lm_head)
    trimmed = eagle3(lm_head=lm_head, draft_token_ids=DRAFTED)
    assert torch.equal(whole.lm_head.weight, lm_head.weight)
    assert torch.equal(trimmed.lm_head.weight, lm_head.weight[DRAFTED])
    assert trimmed.lm_head.weight.requires_grad
    assert not torch.equal(eagle3().lm_head.weight, lm_head.weight)
    assert trimmed.shape == replace(SHAPE3, draft_vocab_size=5)
    assert torch.equal(trimmed.draft_token_ids, DRAFTED)
    assert set(trained_weights(trimmed)) == {*MATRICES3, *NORMS3, "lm_head.weight"}


def test_ready_eagle3_head_keeps_weights_and_draft_vocabulary(embedding, tmp_path):
    shape = replace(SHAPE3, draft_vocab_size=5, intermediate_size=40, has_qkv_bias=True)
    ready = write_head(tmp_path / "ready", shape, DRAFTED)
    head = eagle3(ready, embedding=embedding)
    assert head.shape == shape
    assert torch.equal(head.draft_token_ids, DRAFTED)
    assert torch.equal(head.embed_tokens.weight, embedding)
    stored, weights = load_file(ready / "model.safetensors"), trained_weights(head)
    assert weights.keys() == stored.keys() - {"embed_tokens.weight", "d2t", "t2d"}
    assert all(torch.equal(weights[name], stored[name]) for name in weights)
    adapted = eagle3(ready, LORA)
    trainable = [name for name, each in adapted.named_parameters() if each.requires_grad]
    assert len(trainable) == 2 * len(MATRICES3)
    assert trained_weights(adapted).keys() == weights.keys()


def test_draft_vocabulary_of_a_ready_head(embedding, tmp_path):
    other = torch.arange(3, 9)
    settings = {size: SETTINGS.model_copy(update={"draft_vocab_size": size}) for size in (5, 6)}
    trimmed = write_head(tmp_path / "eagle2", replace(READY, draft_vocab_size=5), DRAFTED)
    for size, expected in ((5, DRAFTED), (6, other)):
        head = new_head(
            SMALL_SHAPE, embedding, settings[size], 0, trimmed, None, draft_token_ids=other[:size]
        )
        assert torch.equal(head.draft_token_ids, expected), "its own where it has as many"
        assert head.shape == replace(READY, draft_vocab_size=size)
    whole = write_head(tmp_path / "whole", SHAPE3)
    rows = load_file(whole / "model.safetensors")["lm_head.weight"][other]
    head = eagle3(whole, draft_token_ids=other)
    assert torch.equal(head.lm_head.weight, rows)
    own = write_head(tmp_path / "own", replace(SHAPE3, draft_vocab_size=5), DRAFTED)
    wanted = SETTINGS3.model_copy(update={"draft_vocab_size": 6})
    with pytest.raises(UserError, match=r"drafts 5 tokens, train.draft_vocab_size 6; leave"):
        new_head(SHAPE3, embedding, wanted, 0, own, None, draft_token_ids=other)


def test_ready_head_of_another_kind_or_other_layers_is_refused(embedding, ready, tmp_path):
    with pytest.raises(UserError, match=r"kind eagle2, wanted eagle3; set train.kind"):
        eagle3(ready)
    other = write_head(tmp_path / "other", replace(SHAPE3, feature_layers=(1, 2, 3)))
    with pytest.raises(UserError, match=r"feature_layers \(1, 2, 3\), wanted \(0, 2, 3\); set"):
        eagle3(other)
    lacking = write_head(tmp_path / "lacking", SHAPE3)
    change(lacking, midlayer__hidden_norm__weight=None)
    with pytest.raises(UserError, match=r"weight missing: midlayer.hidden_norm.weight in"):
        eagle3(lacking)
