"""transformers is measured in what is fastest here, and reports say what was tried."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from polybasic.deploy.bench.systems import fastest_loop
from polybasic.deploy.bench.systems.fastest_loop import (
    LoopChoice,
    Way,
    candidate_attentions,
    candidate_dtypes,
    fastest_way,
    set_attention,
)
from polybasic.deploy.bench.systems.system import TimedAnswer

HALF, FULL = Way(torch.bfloat16, "sdpa"), Way(torch.float32, "sdpa")
HALF_EAGER, FULL_EAGER = Way(torch.bfloat16, "eager"), Way(torch.float32, "eager")


@pytest.mark.parametrize(
    ("times", "new_tokens", "chosen"),
    [
        # a prompt is read slowly, which long answers outweigh
        ({HALF: (1.0, 0.02), FULL: (0.1, 0.03)}, 50, FULL),
        ({HALF: (1.0, 0.02), FULL: (0.1, 0.03)}, 200, HALF),
        # about equal: the target's own dtype
        ({HALF: (0.1, 0.02), FULL: (0.1, 0.0195)}, 96, HALF),
        ({HALF: (0.5, 0.02), FULL: (0.1, 0.02)}, 1, FULL),
        # in one dtype any gain counts, and another dtype is compared with the best of these
        ({HALF: (0.1, 0.02), HALF_EAGER: (0.1, 0.0199)}, 96, HALF_EAGER),
        ({HALF: (0.1, 0.03), HALF_EAGER: (0.1, 0.02), FULL: (0.1, 0.0195)}, 96, HALF_EAGER),
        ({HALF: (0.1, 0.02), FULL: (0.1, 0.019), FULL_EAGER: (0.1, 0.01)}, 96, FULL_EAGER),
    ],
)
def test_the_way_is_that_of_the_fastest_answer(
    times: dict[Way, tuple[float, float]], new_tokens: int, chosen: Way
) -> None:
    """Seconds until the first token, and of every other one."""
    slow_first_turn = dict.fromkeys(times, 10.0)  # as when a way is used for the first time

    def answer(way: Way, prompt: list[int], num_tokens: int) -> TimedAnswer:
        first, each = times[way]
        first += slow_first_turn.pop(way, 0.0)
        return TimedAnswer([0] * num_tokens, first + each * (num_tokens - 1), 1, first)

    choice = fastest_way(list(times), answer, [1, 2, 3], new_tokens)
    assert choice.way == chosen
    assert (choice.prompt_tokens, choice.new_tokens) == (3, new_tokens)
    whole = {way: first + (new_tokens - 1) * each for way, (first, each) in times.items()}
    assert choice.seconds == pytest.approx(whole)


def test_what_was_tried_is_said() -> None:
    choice = LoopChoice(FULL, 21, 96, {HALF: 1.5, FULL: 1.25, HALF_EAGER: 2}, ["float16"])
    assert choice.shown == (
        "transformers runs in float32 with sdpa attention, which was measured here: an answer of "
        "96 tokens to a prompt of 21 takes 1.25 s (bfloat16 with sdpa attention takes 1.5 s; "
        "bfloat16 with eager attention takes 2 s). There was not enough memory to try float16."
    )
    assert LoopChoice(FULL, 1, 2, {FULL: 0.5}).shown.endswith("a prompt of 1 takes 0.5 s.")


def test_only_what_can_be_faster_and_fits_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    fast = {torch.float32, torch.bfloat16}
    monkeypatch.setattr(fastest_loop, "multiplies_fast", lambda dtype, device: dtype in fast)
    monkeypatch.setattr(fastest_loop, "available_bytes", lambda device: 1e9)

    def tried(own: torch.dtype, device: torch.device, num_parameters: float = 1e8) -> Any:
        return candidate_dtypes(own, device, int(num_parameters))

    assert tried(torch.bfloat16, cpu) == ([torch.bfloat16, torch.float32], [])
    assert tried(torch.float16, cpu) == ([torch.float16, torch.bfloat16, torch.float32], [])
    assert tried(torch.float32, gpu) == ([torch.float32, torch.bfloat16], [])
    assert tried(torch.bfloat16, gpu) == ([torch.bfloat16], [])
    assert tried(torch.bfloat16, cpu, 2e8) == ([torch.bfloat16], ["float32"])
    fast.remove(torch.bfloat16)
    assert tried(torch.bfloat16, cpu) == ([torch.bfloat16, torch.float32], [])
    assert tried(torch.float32, cpu) == ([torch.float32], [])


def test_attentions_are_those_that_the_model_has(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 8}
    model = LlamaForCausalLM(LlamaConfig(**shape, attn_implementation="eager"))
    assert candidate_attentions(model) == ["eager", "sdpa"]
    assert model.config._attn_implementation == "eager", "it runs as before"
    monkeypatch.setattr(LlamaForCausalLM, "_supports_sdpa", False)  # as Gemma 2's
    assert candidate_attentions(model) == ["eager"]
    assert not set_attention(model, "no such attention")
    assert set_attention(model, "eager")
