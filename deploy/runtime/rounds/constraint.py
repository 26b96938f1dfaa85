"""What may follow in an answer that has to match a grammar: a mask over each row of logits.

All members draw under the same masks, so that a constrained answer is verified as any other: its
distribution is that of the target's logits under the mask, and seeds and greedy equality hold.

#   R = rows (tokens of one pass), V = vocabulary
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.kernels.cpu.library import kernels_for
from polybasic.chain.kernels.drafts import DraftTree
from polybasic.deploy.runtime.rounds.warping import Prefixes

GRAMMAR = "grammar"
"""Named as the proposer of tokens that a grammar foretells."""
MAX_FORETOLD = 15
"""Tokens of a draft that a grammar foretells: with its root as many rows as one pass of kernels."""
_BITS = 32
_NOT_SPELLED = "no token of the chain's tokenizer spells what it asks for"


class Constraint:
    """A grammar's state in one sequence, which follows whatever tokens it is asked about.

    Args:
        matcher: llguidance's, at the beginning of an answer.
        stop_tokens: ids that end an answer, where the grammar allows an end.
        vocab_size: V.
        num_prompt_tokens: leading tokens of every sequence that are not of the answer.
        overwrites: whether logits that are restricted may be lost.
    """

    def __init__(
        self,
        matcher: Any,
        stop_tokens: frozenset[int],
        vocab_size: int,
        num_prompt_tokens: int = 0,
        overwrites: bool = False,
    ) -> None:
        self._matcher, self._stop_tokens, self._vocab_size = matcher, stop_tokens, vocab_size
        self._num_prompt_tokens, self._overwrites = num_prompt_tokens, overwrites
        self._kernels = kernels_for(torch.device("cpu"), torch.float32)
        self._taken: list[int] = []

    def foretold(self, tokens: list[int], max_tokens: int) -> list[int]:
        """What comes next in a text of the grammar, as the tokenizer spells it.

        A draft: other tokens may spell the same text, and the target may take those.

        Args:
            tokens: the sequence so far.
            max_tokens: at most so many.
        """
        if not self._follow(tokens[self._num_prompt_tokens :]):
            return []
        found: list[int] = self._matcher.compute_ff_tokens()
        return found[: min(max_tokens, MAX_FORETOLD)]

    def pruned(self, tree: DraftTree, tokens: list[int]) -> DraftTree:
        """A tree after a sequence without the rows that the grammar refuses, or that end it."""
        output = tokens[self._num_prompt_tokens :]
        return tree.where([not path or self._follow([*output, *path]) for path in tree.paths()])

    def restrict(self, logits: Tensor, prefixes: Prefixes) -> Tensor:
        """Logits [R, V] in float32, minus infinity where a token cannot follow.

        Rows after a token that the grammar refuses, or after the end, stay as they are: nothing
        is drawn from them.

        Args:
            prefixes: one suffix for each row.

        Raises:
            UserError: the grammar is too large for its states to be followed, or no token of the
                tokenizer spells what it asks for.
        """
        output = prefixes.sequence[self._num_prompt_tokens :]
        words = -(-self._vocab_size // _BITS)
        masks = np.empty((len(prefixes.suffixes), words), np.int32)
        for mask, suffix in zip(masks, prefixes.suffixes, strict=True):
            if self._follow([*output, *suffix]):
                self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                if self._matcher.is_error():
                    raise refusal(self._matcher.get_error())
            elif not suffix and output and output[-1] not in self._stop_tokens:
                raise refusal(_NOT_SPELLED)
            else:
                mask.fill(-1)
        if logits.is_cpu and self._kernels is not None:
            masked = logits.float().contiguous()
            if masked is logits and not self._overwrites:
                masked = logits.clone()
            self._kernels.mask(masked, torch.from_numpy(masks))
            return masked
        refused = np.unpackbits(
            ~masks.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little"
        )
        is_refused = torch.from_numpy(refused.view(np.bool_)).to(logits.device)
        return logits.float().masked_fill(is_refused, float("-inf"))

    def check(self) -> None:
        """Check that an answer can begin.

        Raises:
            UserError: as `restrict`.
        """
        [row] = self.restrict(torch.zeros(1, self._vocab_size), Prefixes([], [[]]))
        first = row.isfinite().nonzero()[:1].flatten().tolist()
        if not first or not (first[0] in self._stop_tokens or self._follow(first)):
            raise refusal(_NOT_SPELLED)

    def _follow(self, tokens: list[int]) -> bool:
        """Whether an answer can begin so, and go on."""
        num_common = min(len(self._taken), len(tokens))
        while self._taken[:num_common] != tokens[:num_common]:
            num_common -= 1
        if num_common < len(self._taken):
            self._matcher.rollback(len(self._taken) - num_common)
        num_new = self._matcher.try_consume_tokens(tokens[num_common:])
        self._taken = tokens[: num_common + num_new]
        return len(self._taken) == len(tokens) and not self._stop_tokens.intersection(tokens[-1:])


def refusal(reason: str) -> UserError:
    """The error of a grammar that cannot be used, with the first line of the reason."""
    first = next(iter(reason.strip().splitlines()), "no reason given")
    return UserError("grammar cannot be used", first[:300], "write it in another way")
