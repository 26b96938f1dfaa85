"""Reads an answer of the target again, in passes of the shapes that plans use.

#   R = rows (tokens of one pass), T = tokens of an answer, V = vocabulary
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polybasic.chain.formats.plan import Plan
from polybasic.chain.kernels.drafts import DraftTree
from polybasic.chain.kernels.torch.rows import device_consecutive_rows, device_tree_rows
from polybasic.chain.kernels.torch.trees import DeviceTree
from polybasic.deploy.runtime.graphs.device_passes import PADDING, ROW_BUCKETS, bucket_of
from polybasic.deploy.runtime.graphs.round_parts import device_executor
from polybasic.deploy.runtime.rounds.verifier import Verifier


@dataclass(frozen=True)
class ReadPattern:
    """How passes read an answer: in blocks, or along trees whose other rows hold wrong tokens.

    Attributes:
        rows: of a pass.
        depth: of the trees; None for blocks.
    """

    rows: int
    depth: int | None = None

    def __str__(self) -> str:
        if self.depth is not None:
            return f"trees of {self.rows} rows, {self.depth} deep"
        return "1 row" if self.rows == 1 else f"blocks of {self.rows} rows"


ONE_ROW = ReadPattern(1)
"""How the target alone reads its answers."""


def read_patterns_of(
    plans: Iterable[Plan], verifying: Sequence[str], max_rows: int
) -> list[ReadPattern]:
    """How the target reads in the rounds of some plans; one token at a time comes first.

    Args:
        verifying: names of the chain's verifying members, the target first.
        max_rows: of a block; answers are not longer.
    """
    patterns = [ONE_ROW]
    for plan in plans:
        asking = [name for name in plan.members if name in verifying][:-1]
        asked = [plan.flush[name].length for name in asking]
        is_drafted = plan.members[-1] not in verifying
        depth = max(
            plan.tree.depth if is_drafted else 0,
            plan.ngram.num_tokens if plan.ngram is not None else 0,
        )
        if not asked and depth:
            patterns.append(ReadPattern(plan.tree.rows, min(depth, plan.tree.rows - 1)))
        if asked:
            # an unread token, and a block whose last round gained as much as it can
            largest = min(sum(asked) + depth + 1, max_rows)
            flush = plan.flush[verifying[0]]
            smallest = 2 if flush.adaptive is not None else flush.length + 1
            between = [rows for rows in ROW_BUCKETS if smallest < rows < largest]
            patterns += map(ReadPattern, (smallest, *between, largest))
    return list(dict.fromkeys(patterns))


@torch.inference_mode()
def answer_logits(
    verifier: Verifier, prompt: list[int], answer: list[int], pattern: ReadPattern
) -> Tensor:
    """Float32 logits [T, V] for each token of the answer, read in one pattern.

    As in generation, the prompt is read first, without its last token.
    """
    _begin(verifier, prompt)
    return _continue(verifier, prompt, answer, pattern)


@torch.inference_mode()
def perturbed_logits(
    verifier: Verifier, prompt: list[int], answer: list[int], pattern: ReadPattern
) -> Tensor:
    """As `answer_logits`, after a prompt whose keys and values are rounded differently.

    Each is moved by up to one unit in its last place, by the same amount in every call.
    """
    _begin(verifier, prompt)
    generator = torch.Generator(verifier.decoder.device).manual_seed(0)
    for layer in verifier.cache.layers:
        read = layer[:, : verifier.cache.length]
        noise = torch.rand(read.shape, generator=generator, device=read.device) * 2 - 1
        read.copy_(read * (1 + torch.finfo(read.dtype).eps * noise))
    return _continue(verifier, prompt, answer, pattern)


def _begin(verifier: Verifier, prompt: list[int]) -> None:
    verifier.cache.truncate(0)
    if len(prompt) > 1:
        verifier.read(prompt[:-1])
        verifier.cache.keep(range(len(prompt) - 1))


def _continue(
    verifier: Verifier, prompt: list[int], answer: list[int], pattern: ReadPattern
) -> Tensor:
    tokens = [prompt[-1], *answer[:-1]]
    num_tokens = pattern.rows if pattern.depth is None else pattern.depth + 1
    return torch.cat(
        [
            _read(verifier, tokens[first : first + num_tokens], pattern).float()
            for first in range(0, len(tokens), num_tokens)
        ]
    )


def _read(verifier: Verifier, tokens: list[int], pattern: ReadPattern) -> Tensor:
    """Logits after each of the next tokens, which are then committed."""
    tree, rows = None, list(range(len(tokens)))
    if pattern.depth is not None:
        tree, rows = _tree_along(tokens, pattern.rows, verifier.decoder.config.vocab_size)
    if verifier.passes is not None:
        logits = _logits_on_device(verifier, tokens if tree is None else tree)[rows]
    else:
        states = verifier.read(tokens) if tree is None else verifier.read_tree(tree)
        logits = verifier.logits(states[rows])
    verifier.cache.keep(rows)
    return logits


def _tree_along(tokens: list[int], num_rows: int, vocab_size: int) -> tuple[DraftTree, list[int]]:
    """A tree of `num_rows` rows with a path of `tokens`, and the rows of these.

    Each of them has wrong children, which come before the next token of the path.
    """
    tree_tokens: list[int] = []
    parents: list[int] = []
    path: list[int] = []
    for place, token in enumerate(tokens):
        path.append(len(tree_tokens))
        tree_tokens.append(token)
        parents.append(path[-2] if place else -1)
        while len(tree_tokens) < num_rows * (place + 1) // len(tokens):
            tree_tokens.append((token + len(tree_tokens)) % vocab_size)
            parents.append(path[-1])
    return DraftTree(tree_tokens, parents), path


def _logits_on_device(verifier: Verifier, read: list[int] | DraftTree) -> Tensor:
    """Logits [R, V] of a block, padded, or of a tree, as rounds compute them."""
    model, cache = device_executor(verifier), verifier.cache
    prefix = torch.tensor(cache.length, device=model.device)
    if isinstance(read, DraftTree):
        tree = DeviceTree.of(read, model.device)
        token_ids = tree.tokens
        rows = device_tree_rows(prefix, tree.depths, tree.ancestors, verifier.window)
    else:
        padding = [PADDING] * (bucket_of(len(read)) - len(read))
        token_ids = torch.tensor(read + padding, device=model.device)
        rows = device_consecutive_rows(prefix, len(token_ids), verifier.window)
    return model.logits_on_device(model.forward(token_ids, [cache.layers], [rows]))
