"""A sequence that a target holds for stages elsewhere: what is read, drawn and given up."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import MAX_TREE_ROWS
from polybasic.deploy.runtime.chain import Chain
from polybasic.deploy.runtime.drafters.interface import NoDrafter
from polybasic.deploy.runtime.remote.messages import Answer, Begin, Verify, malformed
from polybasic.deploy.runtime.rounds.finite import not_finite
from polybasic.deploy.runtime.rounds.logprobs import logprobs_of
from polybasic.deploy.runtime.rounds.noise import Noise
from polybasic.deploy.runtime.rounds.passes import Passes
from polybasic.deploy.runtime.rounds.sampling import NotFiniteError, Sampler, make_sampler
from polybasic.deploy.runtime.rounds.stages import Block, Kept, TreeStage, verify
from polybasic.deploy.runtime.slots import Slot


@dataclass(frozen=True)
class TargetReply:
    """An answer and the arrays that it carries."""

    answer: Answer
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)


class HeldSequence:
    """A sequence of a connection; it holds caches between `begin` and `end`.

    Its methods are work of the thread that runs all passes.

    Args:
        chain: of which the target is loaded.
    """

    def __init__(self, chain: Chain) -> None:
        self._chain, self._engine = chain, chain.engine
        self._slot: Slot | None = None
        self._stage: TreeStage | None = None
        self._begin: Begin | None = None

    def begin(self, begin: Begin, ids: list[int]) -> Passes[None]:
        """Read the tokens of a sequence that are not known yet, except the last.

        Raises:
            BusyError: as many sequences are held as there are caches for.
            UserError: draws that are not repeatable, or tokens that do not fit.
        """
        sampling, models, slots = begin.sampling, self._engine.models, self._engine.slots
        if not sampling.is_greedy and sampling.seed is None:
            raise malformed("draws without a seed")
        if begin.num_prompt_tokens > len(ids):
            raise malformed(f"{len(ids)} tokens with a prompt of {begin.num_prompt_tokens}")
        sampling.check_vocabulary(models.vocab_size)
        self._check_ids(ids, 0)
        if self._slot is None:
            self._slot = slots.take(ids)
        slots.fill(self._slot, ids)
        verifier = next(iter(self._slot.verifiers.values())).seeing(None, ())
        noise = None if sampling.is_greedy else Noise(models.target, sampling)
        device, num_prompt_tokens = models.device, begin.num_prompt_tokens
        sampler = make_sampler(sampling, device, num_prompt_tokens, "coupled", noise)
        self._begin, self._stage = begin, TreeStage(verifier, NoDrafter(), sampler)
        self._stage.begin(ids, verifier.cache.length)
        self._slot.tokens = self._stage.tokens
        yield from self._stage.catch_up()

    def verify(self, asked: Verify, ids: list[int]) -> Passes[TargetReply]:
        """Verify a block, and keep what the target draws itself.

        Raises:
            UserError: no sequence was begun, a block that is too long, tokens that do not fit, or
                a target that computes no numbers.
        """
        stage = self._stage
        if stage is None:
            raise malformed("a block before a sequence")
        tokens = stage.tokens
        if asked.position != len(tokens) - 1 or ids[0] != tokens[-1]:
            return TargetReply(Answer(number=asked.number, num_kept=-1))
        if len(ids) > MAX_TREE_ROWS:
            raise malformed(f"a block of {len(ids)} tokens, at most {MAX_TREE_ROWS}")
        self._check_ids(ids, len(tokens))
        sampler: Sampler = stage.sampler
        block = Block(ids[1:], None)
        try:
            kept = yield from verify(stage.verifier, sampler, tokens, ids[:1], block)
        except NotFiniteError as error:
            raise not_finite([stage.verifier], tokens) from error
        stage.verifier.cache.keep(range(1 + kept.num_tokens))
        gained = [*block.tokens[: kept.num_tokens], kept.next_token]
        tokens += gained
        answer = Answer(number=asked.number, num_kept=kept.num_tokens, next_token=kept.next_token)
        return TargetReply(answer, self._logprobs(kept, gained))

    def end(self) -> Passes[None]:
        """Leave the caches to others, with what they hold."""
        yield from ()
        if self._slot is not None:
            self._slot.leave()
        self._slot = self._stage = None

    def _logprobs(self, kept: Kept, gained: list[int]) -> dict[str, NDArray[Any]]:
        assert self._begin is not None, "a sequence that was begun"
        if (num := self._begin.logprobs) is None:
            return {}
        rows = logprobs_of(kept.logits[: len(gained)], gained, num)
        shape = (len(rows), num)
        ids = [[token for token, _ in row.top] for row in rows]
        values = [[logprob for _, logprob in row.top] for row in rows]
        return {
            "logprobs": np.array([row.logprob for row in rows], np.float32),
            "top_ids": np.array(ids, np.int32).reshape(shape),
            "top_logprobs": np.array(values, np.float32).reshape(shape),
        }

    def _check_ids(self, ids: list[int], num_before: int) -> None:
        vocab_size, most = self._engine.models.vocab_size, self._engine.context_tokens
        if max(ids) >= vocab_size:
            raise malformed(f"token {max(ids)} of {vocab_size}")
        if num_before + len(ids) > most + MAX_TREE_ROWS or (not num_before and len(ids) > most):
            raise UserError(
                "prompt does not fit the context",
                f"{num_before + len(ids)} tokens in a context of {most}",
                "shorten it or ask for fewer new tokens",
            )
