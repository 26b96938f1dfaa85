"""An answer of the target, read again in one of the ways in which plans read it.

#   R = rows (tokens of one pass), T = tokens of an answer, V = vocabulary
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polybasic.chain.formats.plan import Plan
from polybasic.chain.kernels.torch.rows import causal_rows, tree_rows
from polybasic.deploy.graphs.device_passes import PADDING, ROW_BUCKETS, bucket_of
from polybasic.deploy.graphs.device_tree import DeviceTree
from polybasic.deploy.rounds.tree import DraftTree
from polybasic.deploy.rounds.verifier import Verifier


@dataclass(frozen=True)
class Way:
    """How passes read an answer: in blocks, or along trees that other tokens fill.

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


ONE_ROW = Way(1)
"""How the target alone reads its answers."""


def ways_of(plans: Iterable[Plan], verifying: Sequence[str], most_rows: int) -> list[Way]:
    """How the target reads in the rounds of some plans, a token at a time first.

    Args:
        verifying: names of the chain's verifying members, the target first.
        most_rows: of a block; answers are not longer.
    """
    ways = [ONE_ROW]
    for plan in plans:
        asking = [name for name in plan.members if name in verifying][:-1]
        asked = [plan.flush[name].length for name in asking]
        is_drafted = plan.members[-1] not in verifying
        depth = max(
            plan.tree.depth if is_drafted else 0,
            plan.ngram.num_tokens if plan.ngram is not None else 0,
        )
        if not asked and depth:
            ways.append(Way(plan.tree.rows, min(depth, plan.tree.rows - 1)))
        if asked:
            # an unread token, and a block whose last round brought up all that it can gain
            most = min(sum(asked) + depth + 1, most_rows)
            flush = plan.flush[verifying[0]]
            least = 2 if flush.adaptive is not None else flush.length + 1
            between = [rows for rows in ROW_BUCKETS if least < rows < most]
            ways += map(Way, (least, *between, most))
    return list(dict.fromkeys(ways))


@torch.inference_mode()
def answer_logits(verifier: Verifier, prompt: list[int], answer: list[int], way: Way) -> Tensor:
    """Float32 logits [T, V] behind each token before one of the answer's, read in one way.

    As when answers are generated, the prompt is read first but for its last token.
    """
    _begin(verifier, prompt)
    return _continue(verifier, prompt, answer, way)


@torch.inference_mode()
def disturbed_logits(verifier: Verifier, prompt: list[int], answer: list[int], way: Way) -> Tensor:
    """As `answer_logits`, behind a prompt whose keys and values were rounded otherwise.

    Each is moved by up to one unit in its last place, always by the same.
    """
    _begin(verifier, prompt)
    generator = torch.Generator(verifier.decoder.device).manual_seed(0)
    for layer in verifier.cache.layers:
        read = layer[:, : verifier.cache.length]
        noise = torch.rand(read.shape, generator=generator, device=read.device) * 2 - 1
        read.copy_(read * (1 + torch.finfo(read.dtype).eps * noise))
    return _continue(verifier, prompt, answer, way)


def _begin(verifier: Verifier, prompt: list[int]) -> None:
    verifier.cache.truncate(0)
    if len(prompt) > 1:
        verifier.read(prompt[:-1])
        verifier.cache.keep(range(len(prompt) - 1))


def _continue(verifier: Verifier, prompt: list[int], answer: list[int], way: Way) -> Tensor:
    tokens = [prompt[-1], *answer[:-1]]
    num_tokens = way.rows if way.depth is None else way.depth + 1
    return torch.cat(
        [
            _read(verifier, tokens[first : first + num_tokens], way).float()
            for first in range(0, len(tokens), num_tokens)
        ]
    )


def _read(verifier: Verifier, tokens: list[int], way: Way) -> Tensor:
    """Logits behind each of the next tokens, which are then committed."""
    tree, rows = None, list(range(len(tokens)))
    if way.depth is not None:
        tree, rows = _tree_along(tokens, way.rows, verifier.decoder.config.vocab_size)
    if verifier.passes is not None:
        logits = _logits_on_device(verifier, tokens if tree is None else tree)[rows]
    else:
        states = verifier.read(tokens) if tree is None else verifier.read_tree(tree)
        logits = verifier.logits(states[rows])
    verifier.cache.keep(rows)
    return logits


def _tree_along(tokens: list[int], num_rows: int, vocab_size: int) -> tuple[DraftTree, list[int]]:
    """A tree of `num_rows` rows with a path of `tokens`, and the rows of these.

    Below each of them hang some that are wrong, before the next one and its own.
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
    """Logits [R, V] of a block, which is filled up, or of a tree, as rounds compute them."""
    model, cache, device = verifier.decoder.device_model, verifier.cache, verifier.decoder.device
    assert model is not None
    prefix = torch.tensor(cache.length, device=device)
    if isinstance(read, DraftTree):
        tree = DeviceTree.of(read, device)
        token_ids = tree.tokens
        rows = tree_rows(prefix, tree.depths, tree.ancestors, verifier.window)
    else:
        padding = [PADDING] * (bucket_of(len(read)) - len(read))
        token_ids = torch.tensor(read + padding, device=device)
        rows = causal_rows(prefix, len(token_ids), verifier.window)
    return model.logits(model.forward(token_ids, cache.layers, rows))
