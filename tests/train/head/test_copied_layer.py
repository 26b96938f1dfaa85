"""A head that starts as the last layer of its verifier."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
)
from transformers import Qwen3ForCausalLM as Qwen3

from polybasic.train.data.batches import LocalBatch
from polybasic.train.features.lm_head import LmHead
from polybasic.train.features.target import Target
from polybasic.train.head.copied_layer import copy_last_layer, has_copied_layer, has_qkv_biases
from polybasic.train.head.eagle2 import Eagle2Head
from polybasic.train.settings import HeadSettings

SETTINGS = HeadSettings(start="auto")
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def verifier_of(model: Any) -> Target:
    """A model with weights of all sizes, also of its norms, whose last layer adds a little."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = 0.3 if weight.dim() == 2 else 0.5
            if "v_proj" in name:  # so that attention counts as much as the MLP
                spread *= 4
            weight.copy_(spread * torch.randn(weight.shape, generator=generator))
            if "norm" in name:
                weight.add_(1.5).abs_()
    weight = model.get_output_embeddings().weight
    return Target(model.eval(), None, LmHead(weight), model.get_input_embeddings().weight)


def share(seed: int = 1) -> LocalBatch:
    token_ids = torch.randint(96, (16, 32), generator=torch.Generator().manual_seed(seed))
    is_assistant = torch.arange(32).expand(16, 32) >= 8
    return LocalBatch(token_ids, is_assistant, range(16))


def copied(verifier: Target) -> Eagle2Head:
    shape = replace(verifier.head_shape(SETTINGS), has_qkv_bias=has_qkv_biases(verifier))
    assert has_copied_layer(verifier, shape)
    torch.manual_seed(2)
    head = Eagle2Head(shape, verifier.embedding)
    copy_last_layer(head, verifier, [share()])
    return head


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_given_what_enters_the_last_layer_the_head_gives_the_state(family: str) -> None:
    if family == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    verifier = verifier_of(model)
    head, inner = copied(verifier), model.model
    modules = [inner.layers[-1], inner.norm]
    states, (entering, leaving) = verifier.states_with_inputs(modules, share().token_ids)
    size = leaving.square().mean(-1, keepdim=True).sqrt()
    stream = entering * inner.norm.weight / size

    def found() -> float:
        with torch.no_grad():
            return error(head.layers[0](stream, torch.arange(32), None, None)[0], states)

    least = found()
    assert least < 0.05 < error(stream, states)
    for name in ("self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"):
        for scale in (0.8, 1.25):
            parts = head.layers[0].get_submodule(name)
            kept = parts.weight.detach().clone()
            parts.weight.data.mul_(scale)
            assert found() > least, f"{name} times {scale}"
            parts.weight.data.copy_(kept)


def error(found: Tensor, expected: Tensor) -> float:
    """Relative, of the rows whose prediction counts."""
    rows = slice(8, None)
    away = (found - expected)[:, rows].square().sum()
    return (away / expected[:, rows].square().sum()).item()


def rows_of(verifier: Target, given: LocalBatch) -> tuple[Tensor, Tensor]:
    """What fc reads, and what it should give."""
    inner: Any = verifier.model.model
    states, (entering, leaving) = verifier.states_with_inputs(
        [inner.layers[-1], inner.norm], given.token_ids
    )
    size = leaving.square().mean(-1, keepdim=True).sqrt()
    wanted = (entering * inner.norm.weight / size)[:, 1:-1].detach()
    counted = given.is_assistant[:, 2:]
    read = torch.cat((verifier.embedding[given.token_ids[:, 1:-1]], states[:, :-2]), -1)[counted]
    return read.detach().double(), wanted[counted].double()


def test_fc_is_the_closest_map_to_what_enters_the_last_layer() -> None:
    verifier = verifier_of(LlamaForCausalLM(LlamaConfig(**SIZES)))
    head = copied(verifier)
    read, wanted = rows_of(verifier, share())
    best = torch.linalg.lstsq(read, wanted).solution
    least = (read @ best - wanted).square().mean()
    with torch.no_grad():
        found = (head.fc(read.float()) - wanted).square().mean()
    assert least <= found < 1.02 * least


def test_layers_that_heads_do_not_have_are_not_copied() -> None:
    llama = verifier_of(LlamaForCausalLM(LlamaConfig(**SIZES)))
    narrow = HeadSettings(start="auto", intermediate_size=32)
    assert not has_copied_layer(llama, llama.head_shape(narrow))
    for model in (
        Qwen3(Qwen3Config(**SIZES)),
        Gemma2ForCausalLM(Gemma2Config(**SIZES)),
        LlamaForCausalLM(LlamaConfig(**SIZES, mlp_bias=True)),
        LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="gelu")),
    ):
        verifier = verifier_of(model)
        assert not has_copied_layer(verifier, verifier.head_shape(SETTINGS)), type(model).__name__


def test_the_map_is_one_for_other_rows_than_those_that_it_was_found_from() -> None:
    """Of as many rows as unknowns, all but the ridge would fit noise."""
    verifier = verifier_of(LlamaForCausalLM(LlamaConfig(**SIZES)))
    shape = replace(verifier.head_shape(SETTINGS), has_qkv_bias=has_qkv_biases(verifier))
    head = Eagle2Head(shape, verifier.embedding)
    given = share()
    rows = [slice(row, row + 1) for row in range(16)]
    parts = [LocalBatch(given.token_ids[row], given.is_assistant[row], range(1)) for row in rows]

    def error_on_others(shares: list[LocalBatch]) -> float:
        copy_last_layer(head, verifier, shares)
        read, wanted = rows_of(verifier, other := share(seed=3))
        assert other.token_ids.shape == given.token_ids.shape
        with torch.no_grad():
            return ((head.fc(read.float()) - wanted).square().sum() / wanted.square().sum()).item()

    without_check = error_on_others(parts[:4])
    assert error_on_others(parts[:5]) < 0.7 * without_check
    assert error_on_others(parts) < error_on_others(parts[:5])
