"""The dequantized intermediate as the model whose states a head learns."""

import json

import pytest
import torch
from safetensors.torch import save_file

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.awq import dequantize, round_to_nearest
from polybasic.chain.formats.checkpoints.quantization import quantization_config
from polybasic.train.features.target import load_intermediate, load_target
from tests.checkpoints import write_family

CPU = torch.device("cpu")


def write_intermediate(folder, target):
    """Round a loaded target's linears in place and write them as AutoAWQ stores them."""
    tensors = {}
    for name, parameter in target.model.named_parameters():
        if ".layers." in name and parameter.dim() == 2:
            weight = round_to_nearest(parameter.float())
            packed = weight.pack()
            for part, tensor in zip(("qweight", "qzeros", "scales"), packed, strict=True):
                tensors[f"{name.removesuffix('weight')}{part}"] = tensor.contiguous()
            parameter.copy_(dequantize(weight))
        else:
            tensors[name] = parameter.half()
            parameter.copy_(tensors[name])
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = target.model.config.to_dict() | {"quantization_config": quantization_config()}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", ["llama3", "gemma2", "phi3"])
def test_states_and_distribution_are_those_of_the_rounded_weights(family, tmp_path):
    write_family(tmp_path / "target", family, dtype=torch.float32)
    target, expected = (load_target(tmp_path / "target", CPU) for _ in range(2))
    write_intermediate(tmp_path / "intermediate", expected)
    found = load_intermediate(tmp_path / "intermediate", tmp_path / "target", CPU, torch.float32)
    token_ids = torch.arange(40).view(2, 20)
    features, true_features, exact = (
        each.features(token_ids, feature_layers=(0, 1, 2)) for each in (found, expected, target)
    )
    assert torch.equal(features.states, true_features.states)
    assert torch.equal(features.layers, true_features.layers)
    assert torch.equal(found.lm_head(features.states), expected.lm_head(true_features.states))
    assert not torch.allclose(features.states, exact.states, atol=1e-2), "rounding takes part"
    assert torch.equal(found.embedding, expected.embedding)
    assert found.tokenizer.chat_template == target.tokenizer.chat_template
    assert not any(each.requires_grad for each in found.model.parameters())
    half = load_intermediate(tmp_path / "intermediate", tmp_path / "target", CPU, torch.bfloat16)
    assert half.features(token_ids).states.dtype == torch.bfloat16


def test_a_checkpoint_that_is_not_in_4_bits_is_refused(tmp_path):
    write_family(tmp_path / "target", "llama3")
    with pytest.raises(UserError, match="quantization"):
        load_intermediate(tmp_path / "target", tmp_path / "target", CPU, torch.float32)
