"""Big Little Decoder: rounds that keep what is near enough to the target's own token. Not lossless.

Kim et al., "Speculative Decoding with Big Little Decoder", 2023. The little member goes on until it
is unsure of a token (fallback). The target then reads what was written, takes back everything from
the first token on that it finds too improbable (rollback), and draws the next one itself.

How far an answer strays is counted: tokens that were kept though they are not the target's own.
"""

import math
from dataclasses import replace

from polybasic.chain.formats.plan import BigLittle
from polybasic.deploy.runtime.rounds.constraint import Constraint
from polybasic.deploy.runtime.rounds.passes import Passes
from polybasic.deploy.runtime.rounds.sampling import GreedyRows, GreedySampler, Sampling
from polybasic.deploy.runtime.rounds.stages import Block, BlockStage, Kept


class Fallback:
    """Ends a block at the first token of which the little member is not sure.

    Attributes:
        num_sure: tokens before that one.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold, self.num_sure = threshold, 0

    def wants_more(self, probabilities: list[float]) -> bool:
        """Add a round's tokens by the member's probability of each; whether it is sure of all."""
        for probability in probabilities:
            if probability < self._threshold:
                return False
            self.num_sure += 1
        return True


class TolerantSampler(GreedySampler):
    """Draws greedily, and keeps of a block what is not too far from the verifier's own tokens.

    Args:
        lossy: how far that is.
    """

    def __init__(
        self,
        sampling: Sampling,
        num_prompt_tokens: int,
        lossy: BigLittle,
        constraint: Constraint | None = None,
    ) -> None:
        super().__init__(sampling, num_prompt_tokens, constraint)
        self.lossy = lossy

    def _keeps(self, token: int, own: GreedyRows, row: int) -> bool:
        if super()._keeps(token, own, row):
            return True
        # two tokens may be equally probable, the least threshold keeps the target's own alone
        if not (most := self.lossy.rollback_threshold):
            return False
        (probability,) = self.probabilities(own, [row], [token])
        return probability > 0 and -math.log(probability) <= most


class TolerantBlockStage(BlockStage):
    """A block stage that falls back and rolls back."""

    sampler: TolerantSampler

    def _proposed(self, limit: int) -> Passes[Block]:
        fallback = Fallback(self.sampler.lossy.fallback_threshold)
        block = yield from self.below.propose(min(self.flush.length, limit), limit, fallback)
        num = fallback.num_sure
        if num == len(block.tokens):
            return block
        return replace(
            block,
            tokens=block.tokens[:num],
            distributions=self.sampler.take(block.distributions, list(range(num))),
            proposers=block.proposers[:num],
            logprobs=block.logprobs[:num],
        )

    def _verify(self, unread: list[int], block: Block) -> Passes[Kept]:
        kept = yield from super()._verify(unread, block)
        own, tokens = kept.distributions.tokens, block.tokens[: kept.num_tokens]
        self.num_tolerated += sum(token != best for token, best in zip(tokens, own, strict=False))
        return kept
