import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from polybasic.train.head import DraftHead, unrolled_mask
from tests.train.counting import SMALL_SHAPE


@pytest.fixture
def head():
    torch.manual_seed(0)
    return DraftHead(SMALL_SHAPE).double()


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
def test_unrolled_pass_equals_drafting_with_a_cache(head, rows, start):
    token_ids, features = rows
    unrolled = head.unroll(token_ids, features, 4)
    # the cache holds rows 0 .. start-1 with true features, then three drafted rows follow
    output, cache = head(token_ids[:, :start], features[:, :start], torch.arange(start))
    torch.testing.assert_close(unrolled[0][:, start - 1], output[:, -1])
    for step in range(1, 4):
        row = start + step - 1
        output, cache = head(
            token_ids[:, row : row + 1],
            output[:, -1:],
            torch.tensor([row]),
            cache,
            torch.ones(1, row + 1, dtype=torch.bool),
        )
        torch.testing.assert_close(unrolled[step][:, row], output[:, 0])


def test_plain_causal_mask_over_own_keys_would_be_another_thing(head, rows):
    token_ids, features = rows
    first, second = head.unroll(token_ids, features, 2)
    shifted = torch.cat((features[:, :1], first[:, :-1]), dim=1)
    plain, _ = head(token_ids, shifted, torch.arange(9))
    assert not torch.allclose(plain[:, 4], second[:, 4], atol=1e-3)


def test_padding_on_the_right_changes_nothing(head, rows):
    token_ids, features = rows
    whole = head.unroll(token_ids, features, 3)
    cut = head.unroll(token_ids[:, :6], features[:, :6], 3)
    for each, part in zip(whole, cut, strict=True):
        torch.testing.assert_close(each[:, :6], part)
