"""The source target in transformers' own generation loop."""

import time
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from polybasic.chain.reference_model import load_reference_model
from polybasic.deploy.sampling import Sampling


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
        self.stop_tokens = stop_tokens

    def generate(
        self, token_ids: list[int], max_new_tokens: int, sampling: Sampling
    ) -> tuple[list[int], float]:
        """New token ids, a stop token included, and seconds."""
        ids = torch.tensor([token_ids], device=self.model.device)
        stop = sorted(self.stop_tokens)
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=sampling.temperature > 0,
            eos_token_id=stop or None,
            pad_token_id=stop[0] if stop else 0,
            **_sampling_options(sampling),
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
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Float32 logits [V] behind `token_ids`, read in one pass."""
        ids = torch.tensor([token_ids], device=self.model.device)
        return self.model(ids, use_cache=False).logits[0, -1].float()


def _sampling_options(sampling: Sampling) -> dict[str, Any]:
    if sampling.temperature == 0:
        return {}
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or 0,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
    }
