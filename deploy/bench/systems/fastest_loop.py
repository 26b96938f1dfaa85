"""The dtype and attention implementation in which transformers answers fastest here, measured."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from polybasic.chain.kernels.product_times import DTYPES, multiplies_fast, name_of
from polybasic.deploy.bench.systems.system import TimedAnswer
from polybasic.deploy.runtime.hardware import available_bytes
from polybasic.deploy.runtime.memory import MARGIN

_TIMED_TOKENS, _MIN_TURNS, _MAX_TURNS, _ENOUGH_SECONDS = 16, 2, 4, 20.0
_CLEARLY_FASTER = 0.95
"""Of the time in the target's own dtype: what takes less is faster, and no noise."""


class Way(NamedTuple):
    """In which transformers can run a model.

    Attributes:
        dtype: of weights and passes.
        attention: implementation, as transformers names it.
    """

    dtype: torch.dtype
    attention: str

    def __str__(self) -> str:
        return f"{name_of(self.dtype)} with {self.attention} attention"


@dataclass(frozen=True)
class LoopChoice:
    """A way, and what an answer takes in each that was tried.

    Attributes:
        way: that was chosen.
        prompt_tokens: of the prompt that was read.
        new_tokens: of the answer.
        seconds: of an answer by way, the target's own dtype first.
        left_out: names of dtypes that there was no memory to try.
    """

    way: Way
    prompt_tokens: int
    new_tokens: int
    seconds: dict[Way, float]
    left_out: list[str] = field(default_factory=list)

    @property
    def shown(self) -> str:
        """A sentence or two for readers of a report."""
        others = "; ".join(
            f"{way} takes {_shown(seconds)}"
            for way, seconds in sorted(self.seconds.items(), key=lambda item: item[1])
            if way != self.way
        )
        text = (
            f"transformers runs in {self.way}, which was measured here: an answer of "
            f"{self.new_tokens} tokens to a prompt of {self.prompt_tokens} takes "
            f"{_shown(self.seconds[self.way])}{f' ({others})' if others else ''}."
        )
        if self.left_out:
            text += f" There was not enough memory to try {' and '.join(self.left_out)}."
        return text


def _shown(seconds: float) -> str:
    return f"{seconds:.3g} s"


def candidate_dtypes(
    own: torch.dtype, device: torch.device, num_parameters: int
) -> tuple[list[torch.dtype], list[str]]:
    """The target's own dtype, then others that can be faster, and names of those without memory.

    Others are those in which the device multiplies fast. On a GPU float32 is none of these: it
    takes twice the bytes and far more time for a product.
    """
    others = [
        dtype
        for dtype in DTYPES.values()
        if dtype != own
        and multiplies_fast(dtype, device)
        and not (device.type == "cuda" and dtype == torch.float32)
    ]
    available = available_bytes(device)
    num_bytes = num_parameters * sum(dtype.itemsize for dtype in (own, *others))
    if available is not None and MARGIN * num_bytes > available:
        return [own], [name_of(dtype) for dtype in others]
    return [own, *others], []


def candidate_attentions(model: PreTrainedModel) -> list[str]:
    """Attention implementations that a model can run here, the one it was loaded with first."""
    own: str = model.config._attn_implementation
    names = [own, "sdpa", "eager"]
    # it computes in two bytes alone, and transformers would fetch it where it is not installed
    if model.device.type == "cuda" and model.dtype.itemsize == 2 and is_flash_attn_2_available():
        names.append("flash_attention_2")
    usable = [name for name in dict.fromkeys(names) if set_attention(model, name)]
    set_attention(model, own)
    return usable


def set_attention(model: PreTrainedModel, name: str) -> bool:
    """Whether a model has this attention implementation, and runs it from now on."""
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError):  # as transformers refuses what a model has not
        return False
    return bool(model.config._attn_implementation == name)


def fastest_way(
    ways: Sequence[Way],
    answer: Callable[[Way, list[int], int], TimedAnswer],
    prompt: list[int],
    new_tokens: int,
) -> LoopChoice:
    """The way that answers fastest; one in the dtype of the first of `ways` if about equal.

    Each reads the prompt and decodes some tokens, in turns with the others, which gives the time of
    a whole answer.

    Args:
        ways: to try, those in the target's own dtype first.
        answer: reads a prompt in a way and answers so many tokens.
        prompt: token ids, as long as usual.
        new_tokens: of the answer that is judged by, at least 1.
    """
    firsts = dict.fromkeys(ways, float("inf"))  # seconds until the first token
    decoding = dict.fromkeys(ways, float("inf"))  # seconds of `num_decoded` more
    num_decoded, began = min(_TIMED_TOKENS, new_tokens - 1), time.perf_counter()
    for turn in range(_MAX_TURNS):
        if turn >= _MIN_TURNS and time.perf_counter() - began > _ENOUGH_SECONDS:
            break
        for way in ways:
            timed = answer(way, prompt, 1 + num_decoded)
            firsts[way] = min(firsts[way], timed.first_seconds)
            decoding[way] = min(decoding[way], timed.seconds - timed.first_seconds)
    per_answer = (new_tokens - 1) / max(num_decoded, 1)
    seconds = {way: firsts[way] + per_answer * decoding[way] for way in ways}
    own = min((way for way in ways if way.dtype == ways[0].dtype), key=seconds.__getitem__)
    best = min(ways, key=seconds.__getitem__)
    chosen = best if seconds[best] < _CLEARLY_FASTER * seconds[own] else own
    return LoopChoice(chosen, len(prompt), new_tokens, seconds)
