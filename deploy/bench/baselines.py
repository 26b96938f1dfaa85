"""The source target in transformers' own generation loop, in the dtype in which that is fastest."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from polybasic.chain.errors import UserError
from polybasic.chain.kernels.product_times import DTYPES, multiplies_fast, name_of
from polybasic.chain.model.reference import load_reference_model
from polybasic.deploy.hardware import available_bytes
from polybasic.deploy.memory import MARGIN
from polybasic.deploy.rounds.sampling import Sampling

_TIMED_TOKENS, _MIN_TURNS, _MAX_TURNS, _ENOUGH_SECONDS = 16, 2, 4, 20.0
_CLEARLY_FASTER = 0.95
"""Of the time in the target's own dtype: what takes less is faster, and no noise."""


class TransformersBaseline:
    """`generate` of transformers over the checkpoint, as a user of it would call it.

    Args:
        target: the checkpoint folder.
        stop_tokens: ids that end an answer.
    """

    def __init__(
        self,
        target: Path,
        dtype: torch.dtype,
        device: torch.device,
        stop_tokens: frozenset[int],
    ) -> None:
        self.model: Any = load_reference_model(target, dtype, device)
        # Otherwise the checkpoint's settings would be merged into requests that do not set them.
        self.model.generation_config = GenerationConfig()
        self.stop_tokens = stop_tokens

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights and passes."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    def generate(
        self,
        token_ids: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        min_new_tokens: int = 0,
    ) -> tuple[list[int], float]:
        """New token ids, a stop token included, and seconds.

        Raises:
            UserError: a setting that transformers' loop does not support.
        """
        ids = torch.tensor([token_ids], device=self.model.device)
        stop = sorted(self.stop_tokens)
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            eos_token_id=stop or None,
            pad_token_id=stop[0] if stop else 0,
            **_options(sampling),
        )
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        begin = time.perf_counter()
        with torch.inference_mode():
            output = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config
            )
        new_tokens = output[0, len(token_ids) :].tolist()
        return new_tokens, time.perf_counter() - begin

    @torch.inference_mode()
    def logits(self, token_ids: list[int], num: int) -> torch.Tensor:
        """Float32 logits [num, V] after each of the last `num` tokens, read in one pass."""
        ids = torch.tensor([token_ids], device=self.model.device)
        found = self.model(ids, use_cache=False, logits_to_keep=num).logits[0, -num:]
        return torch.as_tensor(found).float()


@dataclass(frozen=True)
class TimedAnswer:
    """What an answer of transformers takes in each dtype that was tried.

    Attributes:
        prompt_tokens: of the prompt that was read.
        new_tokens: of the answer.
        seconds: by name of the dtype, the target's own first.
        left_out: dtypes that there was no memory to try.
    """

    prompt_tokens: int
    new_tokens: int
    seconds: dict[str, float]
    left_out: list[str] = field(default_factory=list)


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


def fastest_baseline(
    load: Callable[[torch.dtype], TransformersBaseline],
    dtypes: Sequence[torch.dtype],
    prompt: list[int],
    new_tokens: int,
) -> tuple[TransformersBaseline, TimedAnswer]:
    """The baseline in the dtype in which it answers fastest; the first of `dtypes` if about equal.

    Each reads the prompt and decodes some tokens, in turns with the others, which gives the time of
    a whole answer. All are in memory together.

    Args:
        load: makes the baseline in a dtype.
        dtypes: to try, the target's own first.
        prompt: token ids, as long as usual.
        new_tokens: of the answer that is judged by, at least 1.
    """
    baselines = {dtype: load(dtype) for dtype in dtypes}
    firsts = dict.fromkeys(dtypes, float("inf"))  # seconds until the first token
    decoding = dict.fromkeys(dtypes, float("inf"))  # seconds until `num_decoded` more
    num_decoded, began = min(_TIMED_TOKENS, new_tokens - 1), time.perf_counter()
    for turn in range(_MAX_TURNS):
        if turn >= _MIN_TURNS and time.perf_counter() - began > _ENOUGH_SECONDS:
            break
        for dtype, baseline in baselines.items():
            for least, num_tokens in ((firsts, 1), (decoding, 1 + num_decoded)):
                _, seconds = baseline.generate(prompt, num_tokens, Sampling(), num_tokens)
                least[dtype] = min(least[dtype], seconds)

    def of_answer(dtype: torch.dtype) -> float:
        per_token = max(decoding[dtype] - firsts[dtype], 0.0) / max(num_decoded, 1)
        return firsts[dtype] + (new_tokens - 1) * per_token

    own = dtypes[0]
    best = min(dtypes, key=of_answer)
    chosen = best if of_answer(best) < _CLEARLY_FASTER * of_answer(own) else own
    seconds_by_name = {name_of(dtype): of_answer(dtype) for dtype in dtypes}
    return baselines[chosen], TimedAnswer(len(prompt), new_tokens, seconds_by_name)


def _options(sampling: Sampling) -> dict[str, Any]:
    """Every setting by its name in transformers, with the neutral value if it is off.

    Raises:
        UserError: a setting that transformers' loop does not support.
    """
    for name in ("presence_penalty", "frequency_penalty"):
        if value := getattr(sampling, name):
            raise UserError(
                "setting unknown to transformers",
                f"{name}={value}",
                "compare without it, or without hf_generate",
            )
    options: dict[str, Any] = {
        "do_sample": not sampling.is_greedy,
        "repetition_penalty": float(sampling.repetition_penalty),
    }
    if sampling.logit_bias:
        options["sequence_bias"] = {
            (token,): float(bias) for token, bias in sampling.logit_bias.items()
        }
    if not sampling.is_greedy:
        options |= {
            "temperature": float(sampling.temperature),
            "top_k": sampling.top_k or 0,
            "top_p": 1.0 if sampling.top_p is None else float(sampling.top_p),
            "min_p": sampling.min_p,
        }
    return options
