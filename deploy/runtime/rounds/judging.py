"""AutoJudge: rounds that keep a token which is not the target's own where it matters little.

Garipov et al., "AutoJudge: Judge Decoding Without Manual Annotation", 2025. The target reads a
block as ever. Of the first token that is not its own, a logistic classifier tells from hidden
states of both members how probably it matters to the answer: below a threshold it is kept, and the
next such token is judged. Not lossless.

The states are the target's after the token, and the proposing member's before it, which drew it:
that member has not read the last token of its block, which is where it was the least sure.

#   W = width of a member's hidden states
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import Judge
from polybasic.deploy.runtime.rounds.constraint import Constraint
from polybasic.deploy.runtime.rounds.passes import Passes
from polybasic.deploy.runtime.rounds.sampling import GreedySampler, Sampling
from polybasic.deploy.runtime.rounds.stages import Block, BlockStage, Kept, TreeStage
from polybasic.deploy.runtime.rounds.verifier import Verifier


@dataclass(frozen=True)
class Classifier:
    """Tells how probably a token matters.

    Attributes:
        weight: float32 [W of the target + W of the proposing member].
        bias: added to the product.
    """

    weight: Tensor
    bias: float

    def importance(self, features: Tensor) -> float:
        """Probability that a token matters.

        Args:
            features: float32 [W + W]: hidden states by both members.
        """
        return float((self.weight @ features + self.bias).sigmoid())


def read_classifier(path: Path) -> Classifier:
    """The classifier of a file as `polybasic.train.judge` writes it.

    Raises:
        UserError: no such file, or it holds no classifier.
    """
    do = "name the file that polybasic plan --rule autojudge wrote beside the plan"
    if not path.is_file():
        raise UserError("judge not found", str(path), do)
    try:
        tensors = load_file(path)
        weight, bias = tensors["weight"].float(), tensors["bias"].float()
    except (SafetensorError, KeyError) as error:
        raise UserError("file is no judge", f"{path}: {error}", do) from error
    is_finite = bool(torch.isfinite(weight).all() & torch.isfinite(bias).all())
    if weight.dim() != 1 or bias.shape != (1,) or not is_finite:
        where = f"{path}: weight {list(weight.shape)}, bias {list(bias.shape)}"
        raise UserError("file is no judge", where if is_finite else f"{path}: not finite", do)
    return Classifier(weight, float(bias))


class JudgingSampler(GreedySampler):
    """Draws greedily; its block stage asks the judge.

    Args:
        judge: of the plan.
        width: of the hidden states of both members together.

    Raises:
        UserError: as `read_classifier`; the judge was trained for other models.
    """

    def __init__(
        self,
        sampling: Sampling,
        num_prompt_tokens: int,
        judge: Judge,
        width: int,
        constraint: Constraint | None = None,
    ) -> None:
        super().__init__(sampling, num_prompt_tokens, constraint)
        self.threshold = judge.threshold
        self.classifier = read_classifier(Path(judge.file))
        if len(self.classifier.weight) != width:
            raise UserError(
                "the judge was trained for other models",
                f"{judge.file}: {len(self.classifier.weight)} weights, for {width} hidden values",
                "train one for this chain: polybasic plan CHAIN --rule autojudge",
            )


class RememberingTreeStage(TreeStage):
    """A tree stage that keeps the states of what it proposed last.

    Attributes:
        states: of each token's predecessor, which it was drawn from.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.states: list[Tensor] = []

    def propose(self, *given: Any) -> Passes[Block]:
        self.states = []
        return (yield from super().propose(*given))

    def _commit(self, gained: list[int], states: Tensor) -> None:
        self.states.append(states)
        super()._commit(gained, states)


class JudgedBlockStage(BlockStage):
    """A block stage that keeps what the judge finds of little importance."""

    below: RememberingTreeStage
    sampler: JudgingSampler

    def _verify(self, unread: list[int], block: Block) -> Passes[Kept]:
        kept = yield from super()._verify(unread, block)
        own, states = kept.distributions.tokens, kept.states[len(unread) :]
        num_kept, num_tokens = kept.num_tokens, len(block.tokens)
        while num_kept < num_tokens:
            if block.tokens[num_kept] != own[num_kept]:
                if not self._tolerates(block, num_kept, states):
                    break
                self.num_tolerated += 1
            num_kept += 1
        # what follows was read after these tokens
        return Kept(num_kept, own[num_kept], kept.states, kept.distributions, kept.logits)

    def _tolerates(self, block: Block, place: int, states: Tensor) -> bool:
        """Whether a token of the block stays, though it is not the target's own.

        Args:
            place: of the token in the block.
            states: of the block's tokens, by the target.
        """
        features = self._features(place, states)
        return self.sampler.classifier.importance(features) < self.sampler.threshold

    def _features(self, place: int, states: Tensor) -> Tensor:
        """Float32 [W + W]: hidden states after a token, by the target, and before it, by the
        proposing member, each with a root mean square of 1."""
        below = torch.cat(self.below.states)[place]
        parts = states[place, : _width(self.verifier)], below[: _width(self.below.verifier)]
        hidden = [part.float().cpu() for part in parts]
        return torch.cat([part / part.square().mean().sqrt() for part in hidden])


def _width(verifier: Verifier) -> int:
    return verifier.decoder.config.hidden_size
