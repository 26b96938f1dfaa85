"""The loops of transformers' generate() over the source target, as its users call them."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from polybasic.chain.base.errors import UserError
from polybasic.chain.kernels.product_times import name_of
from polybasic.chain.kernels.torch.encoder_decoder import source_length
from polybasic.chain.model.reference import load_reference_model
from polybasic.deploy.bench.systems.system import System, TimedAnswer
from polybasic.deploy.runtime.rounds.sampling import Sampling


def load_for_generate(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A checkpoint for `GenerateLoop`.

    Raises:
        UserError: as `load_reference_model`.
    """
    model = load_reference_model(folder, dtype, device)
    # Otherwise the checkpoint's settings would be merged into requests that do not set them.
    model.generation_config = GenerationConfig()
    return model


class GenerateLoop(System):
    """generate() over a model, plain or with settings that choose another of its loops.

    Args:
        name, description: see `System`.
        model: of `load_for_generate`; loops may share it.
        stop_tokens: ids that end an answer.
        settings: of GenerationConfig, beside those of a request.
        assistant: a model that drafts, of `load_for_generate`.
    """

    runtime = "transformers"

    def __init__(
        self,
        name: str,
        description: str,
        model: PreTrainedModel,
        stop_tokens: frozenset[int],
        settings: Mapping[str, Any] | None = None,
        assistant: PreTrainedModel | None = None,
    ) -> None:
        self.name, self.description = name, description
        self.model: Any = model
        self.dtype = name_of(model.dtype)
        self.stop_tokens = stop_tokens
        self.settings = dict(settings or {})
        self.assistant = assistant

    def answer(
        self,
        prompt: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        min_new_tokens: int = 0,
    ) -> TimedAnswer:
        """See `System`.

        Args:
            min_new_tokens: before which no token ends the answer.
        """
        options = _options(sampling)
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        first = _FirstTokens()
        begin = time.perf_counter()
        output = self._generate(
            prompt,
            self.stop_tokens,
            streamer=first,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            **options,
        )
        token_ids = output[0, len(prompt) - self._num_encoded(prompt) :].tolist()
        seconds = time.perf_counter() - begin
        return TimedAnswer(token_ids, seconds, first.num_tokens, first.time - begin)

    def logits(self, token_ids: list[int], num: int) -> torch.Tensor:
        """Float32 logits [num, V] after each of the last `num` tokens.

        The loop computes them as in an answer: it is made to continue by the given tokens.
        """
        decoded = token_ids[self._num_encoded(token_ids) :]
        forced = LogitsProcessorList([_Forced(decoded)])
        output = self._generate(
            token_ids[: len(token_ids) - num + 1],
            frozenset(),
            logits_processor=forced,
            max_new_tokens=num,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return torch.cat(output.logits).float()

    @torch.inference_mode()
    def _generate(
        self,
        prompt: list[int],
        stop_tokens: frozenset[int],
        streamer: BaseStreamer | None = None,
        logits_processor: LogitsProcessorList | None = None,
        **settings: Any,
    ) -> Any:
        num_encoded = self._num_encoded(prompt)
        ids = torch.tensor([prompt], device=self.model.device)
        decoded = {}
        if num_encoded:
            ids, decoded["decoder_input_ids"] = ids[:, :num_encoded], ids[:, num_encoded:]
            settings["decoder_start_token_id"] = prompt[num_encoded]
        stop = sorted(stop_tokens)
        config = GenerationConfig(
            eos_token_id=stop or None,
            pad_token_id=stop[0] if stop else 0,
            **self.settings,
            **settings,
        )
        # it warns of what it passes to the assistant itself
        with _without_warnings() if self.assistant is not None else nullcontext():
            return self.model.generate(
                ids,
                **decoded,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                streamer=streamer,
                logits_processor=logits_processor,
                assistant_model=self.assistant,
            )

    def _num_encoded(self, token_ids: list[int]) -> int:
        """Leading tokens that an encoder reads."""
        config = self.model.config
        if not config.is_encoder_decoder:
            return 0
        return source_length(token_ids, config.decoder_start_token_id)

    def close(self) -> None:
        """Give up its share of the models."""
        self.model = self.assistant = None


class _FirstTokens(BaseStreamer):
    """Notes when the first new tokens come; generate() waits for each round's in any case.

    Attributes:
        num_tokens: that came first, together.
        time: when, by time.perf_counter; 0 before.
    """

    def __init__(self) -> None:
        self.num_tokens, self.time = 0, 0.0
        self._saw_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if not self._saw_prompt:
            self._saw_prompt = True
        elif not self.num_tokens:
            self.num_tokens, self.time = value.numel(), time.perf_counter()

    def end(self) -> None:
        pass


class _Forced(LogitsProcessor):
    """Leaves the token of a given text as the only choice, and every choice after its end."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = input_ids.shape[1]
        if place >= len(self.token_ids):
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.token_ids[place]] = 0
        return forced


def _options(sampling: Sampling) -> dict[str, Any]:
    """Every setting by its name in transformers, with the neutral value if it is off.

    Raises:
        UserError: a setting that transformers' loops do not support.
    """
    for name in ("presence_penalty", "frequency_penalty"):
        if value := getattr(sampling, name):
            raise UserError(
                "setting unknown to transformers",
                f"{name}={value}",
                "compare without it, or without transformers' systems",
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


@contextmanager
def _without_warnings() -> Iterator[None]:
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
