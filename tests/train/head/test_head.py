from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from polybasic.train.data.packing import positions_in_documents
from polybasic.train.features.lm_head import LmHead
from polybasic.train.features.states import Features
from polybasic.train.head.eagle2 import Eagle2Head, unrolled_mask
from polybasic.train.head.eagle3 import Eagle3Head
from tests.train.counting import SMALL_SHAPE

SHAPE3 = replace(SMALL_SHAPE, kind="eagle3", feature_layers=(0, 1, 2))
DRAFTED = torch.tensor([3, 4, 9, 40, 49])


def eagle3(draft_token_ids=None):
    """With norms that are not all ones, so that leaving one out shows."""
    torch.manual_seed(0)
    num = None if draft_token_ids is None else len(draft_token_ids)
    head = Eagle3Head(replace(SHAPE3, draft_vocab_size=num), draft_token_ids=draft_token_ids)
    for name, parameter in head.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 1.5)
    return head.double()


@pytest.fixture
def head():
    torch.manual_seed(0)
    return Eagle2Head(SMALL_SHAPE).double()


@pytest.fixture(params=["eagle2", "eagle3"])
def either(request, head):
    return head if request.param == "eagle2" else eagle3()


@pytest.fixture
def rows():
    torch.manual_seed(1)
    return torch.randint(50, (2, 9)), torch.randn(2, 9, 32, dtype=torch.double)


def test_parameter_names_are_those_of_eagle(head):
    assert set(head.state_dict()) == {
        "embed_tokens.weight",
        "fc.weight",
        *(f"layers.0.self_attn.{each}_proj.weight" for each in "qkvo"),
        *(f"layers.0.mlp.{each}_proj.weight" for each in ("gate", "up", "down")),
        "layers.0.post_attention_layernorm.weight",
    }
    assert head.fc.weight.shape == (32, 64)
    assert not head.embed_tokens.weight.requires_grad


def test_layer_is_llamas_without_its_input_norm(head, rows):
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_theta=500.0,
        attn_implementation="eager",
    )
    reference = LlamaDecoderLayer(config, 0).double()
    reference.load_state_dict(head.layers[0].state_dict(), strict=False)
    reference.input_layernorm = torch.nn.Identity()
    token_ids, features = rows
    x = head.fc(torch.cat((head.embed_tokens(token_ids), features), dim=-1))
    positions = torch.arange(9)
    mask = torch.full((9, 9), float("-inf"), dtype=torch.double).triu(1)[None, None]
    expected = reference(
        x,
        attention_mask=mask,
        position_embeddings=LlamaRotaryEmbedding(config)(x, positions[None]),
    )
    expected = expected[0] if isinstance(expected, tuple) else expected
    output, _ = head(token_ids, features, positions)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


def test_mask_by_hand():
    mask = unrolled_mask(torch.arange(4), 3).int().view(4, 3, 4).tolist()
    assert mask[3] == [[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert mask[2] == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]
    assert mask[0] == [[0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize("start", [1, 3, 5])
def test_unrolled_pass_equals_drafting_with_a_cache(either, rows, start):
    token_ids, features = rows
    unrolled = either.unroll(token_ids, features, 4)
    # the cache holds rows 0 .. start-1 with true features, then three drafted rows follow
    output, cache = either(token_ids[:, :start], features[:, :start], torch.arange(start))
    torch.testing.assert_close(unrolled[0][:, start - 1], output[:, -1])
    for step in range(1, 4):
        row = start + step - 1
        output, cache = either(
            token_ids[:, row : row + 1],
            output[:, -1:],
            torch.tensor([row]),
            cache,
            torch.ones(1, row + 1, dtype=torch.bool),
        )
        torch.testing.assert_close(unrolled[step][:, row], output[:, 0])


def test_plain_causal_mask_over_own_keys_would_be_another_thing(either, rows):
    token_ids, features = rows
    first, second = either.unroll(token_ids, features, 2)
    shifted = torch.cat((features[:, :1], first[:, :-1]), dim=1)
    plain, _ = either(token_ids, shifted, torch.arange(9))
    assert not torch.allclose(plain[:, 4], second[:, 4], atol=1e-3)


def test_padding_on_the_right_changes_nothing(either, rows):
    token_ids, features = rows
    whole = either.unroll(token_ids, features, 3)
    cut = either.unroll(token_ids[:, :6], features[:, :6], 3)
    for each, part in zip(whole, cut, strict=True):
        torch.testing.assert_close(each[:, :6], part)


def test_eagle3_parameter_names_are_those_of_its_checkpoints():
    head = eagle3(DRAFTED)
    shapes = {name: list(tensor.shape) for name, tensor in head.state_dict().items()}
    assert shapes == {
        "embed_tokens.weight": [50, 32],
        "fc.weight": [32, 96],
        "midlayer.hidden_norm.weight": [32],
        "midlayer.input_layernorm.weight": [32],
        "midlayer.post_attention_layernorm.weight": [32],
        "midlayer.self_attn.q_proj.weight": [32, 64],
        "midlayer.self_attn.k_proj.weight": [16, 64],
        "midlayer.self_attn.v_proj.weight": [16, 64],
        "midlayer.self_attn.o_proj.weight": [32, 32],
        "midlayer.mlp.gate_proj.weight": [48, 32],
        "midlayer.mlp.up_proj.weight": [48, 32],
        "midlayer.mlp.down_proj.weight": [32, 48],
        "norm.weight": [32],
        "lm_head.weight": [5, 32],
    }
    frozen = [name for name, each in head.named_parameters() if not each.requires_grad]
    assert frozen == ["embed_tokens.weight"]


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def test_eagle3_layer_by_its_equations(rows):
    """Token by token, each row's attention written out over the rows before it."""
    head = eagle3()
    token_ids, states = rows
    layers = torch.randn(2, 9, 96, dtype=torch.double)
    features = head.fuse(head.source(Features(states, layers)))
    torch.testing.assert_close(features, layers @ head.fc.weight.T)
    weights = {name.removeprefix("midlayer."): each for name, each in head.state_dict().items()}
    embedded = rms(head.embed_tokens.weight[token_ids], weights["input_layernorm.weight"])
    normed = rms(features, weights["hidden_norm.weight"])
    x = torch.cat((embedded, normed), dim=-1)
    queries, keys, values = (
        (x @ weights[f"self_attn.{each}_proj.weight"].T).unflatten(-1, (-1, 8)) for each in "qkv"
    )
    angles = torch.arange(9)[:, None] * 500.0 ** (-torch.arange(0, 8, 2) / 8)
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.cdouble)[:, None]

    def rotated(heads):
        pairs = torch.complex(heads[..., :4], heads[..., 4:]) * turn
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    queries, keys = rotated(queries), rotated(keys)
    attended = torch.zeros(2, 9, 4, 8, dtype=torch.double)
    for row in range(9):
        for number in range(4):
            seen = keys[:, : row + 1, number // 2]
            scores = (seen * queries[:, row, number][:, None]).sum(-1) / 8**0.5
            shares = scores.softmax(-1)[..., None]
            attended[:, row, number] = (shares * values[:, : row + 1, number // 2]).sum(1)
    middle = features + attended.flatten(2) @ weights["self_attn.o_proj.weight"].T
    inner = rms(middle, weights["post_attention_layernorm.weight"])
    gate, up, down = (weights[f"mlp.{each}_proj.weight"] for each in ("gate", "up", "down"))
    expected = middle + (F.silu(inner @ gate.T) * (inner @ up.T)) @ down.T
    output, _ = head(token_ids, features, torch.arange(9))
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    logits = head.projection(LmHead(torch.zeros(50, 32)))(head.projected(output))
    by_hand = rms(output, head.norm.weight) @ head.lm_head.weight.T
    torch.testing.assert_close(logits, by_hand)


def test_each_kind_projects_onto_its_draft_vocabulary(head):
    verifiers = LmHead(torch.randn(50, 32, dtype=torch.double), softcap=5.0)
    states = torch.randn(3, 32, dtype=torch.double)
    trimmed = Eagle2Head(replace(SMALL_SHAPE, draft_vocab_size=5), draft_token_ids=DRAFTED)
    assert head.projection(verifiers) is verifiers
    assert torch.equal(trimmed.projected(states), states)
    logits = trimmed.projection(verifiers)(states)
    torch.testing.assert_close(logits, verifiers(states)[:, DRAFTED])
    own = eagle3(DRAFTED)
    assert own.projection(verifiers) == LmHead(own.lm_head.weight)


DOCUMENTS = torch.tensor([[0] * 4 + [1] * 5, [0] * 6 + [-1] * 3])


def test_positions_begin_anew_with_each_conversation():
    found = positions_in_documents(DOCUMENTS).tolist()
    assert found == [[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 1, 2]]
