"""The source target in transformers' own generation loop."""

import time
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from polybasic.chain.errors import UserError
from polybasic.chain.model.reference import load_reference_model
from polybasic.deploy.rounds.sampling import Sampling


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

    def generate(
        self, token_ids: list[int], max_new_tokens: int, sampling: Sampling
    ) -> tuple[list[int], float]:
        """New token ids, a stop token included, and seconds.

        Raises:
            UserError: a setting that transformers' loop does not support.
        """
        ids = torch.tensor([token_ids], device=self.model.device)
        stop = sorted(self.stop_tokens)
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
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
