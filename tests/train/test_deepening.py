"""A deepened model computes what it did before, and all of its layers can learn."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from polybasic.train.deepening import deepen

TOKEN_IDS = torch.arange(24)[None]


def shallow() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )


@pytest.mark.parametrize("num_layers", [2, 3, 6])
def test_it_computes_as_before(num_layers: int) -> None:
    model = shallow()
    weights = dict(model.named_parameters())
    before = model(TOKEN_IDS).logits
    kept = set(map(id, weights.values()))
    deepen(model, num_layers)
    assert len(model.model.layers) == model.config.num_hidden_layers == num_layers
    assert kept <= {id(weight) for weight in model.parameters()}
    assert torch.equal(model(TOKEN_IDS).logits, before)
    # with a cache too, in which each layer has a place of its own
    prefix = model(TOKEN_IDS[:, :12], use_cache=True)
    rest = model(TOKEN_IDS[:, 12:], past_key_values=prefix.past_key_values).logits
    torch.testing.assert_close(rest, before[:, 12:])


def test_added_layers_learn() -> None:
    model = shallow()
    before = model(TOKEN_IDS).logits
    deepen(model, 4)
    model(input_ids=TOKEN_IDS, labels=TOKEN_IDS).loss.backward()
    for layer in model.model.layers:
        assert layer.self_attn.o_proj.weight.grad.any()
        assert layer.mlp.down_proj.weight.grad.any()
    with torch.no_grad():
        added = model.model.layers[1].mlp.down_proj.weight
        added -= 0.1 * added.grad.sign()
    # the control: what an added layer writes does reach the logits
    assert not torch.allclose(model(TOKEN_IDS).logits, before)
