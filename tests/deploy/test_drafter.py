"""The draft tree against its definition, computed path by path without any shared cache."""

from pathlib import Path

import pytest
import torch

from polybasic.chain.decoder import attend_causally
from polybasic.chain.eagle import EagleHead
from polybasic.chain.manifest import Tree
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.cache import KeyValueCache
from polybasic.deploy.drafter import EagleDrafter

TREES = [
    Tree(depth=1, top_k=3, rows=3),
    Tree(depth=3, top_k=1, rows=4),
    Tree(depth=4, top_k=3, rows=12),
    Tree(depth=3, top_k=4, rows=30),
]


@pytest.fixture
def chain(tiny_chain: Path) -> Chain:
    return load_chain(tiny_chain, dtype="float32")


def head_of(chain: Chain) -> EagleHead:
    assert chain.engine.models.head is not None
    return chain.engine.models.head[1]


def make_drafter(chain: Chain, tree: Tree) -> EagleDrafter:
    return EagleDrafter(head_of(chain), chain.engine.models.target.lm_head, tree, 200)


def states_of(chain: Chain, tokens: list[int]) -> torch.Tensor:
    verifier = chain.engine.verifiers["target"]
    verifier.cache.truncate(0)
    return verifier.read(tokens)


def log_probabilities(
    chain: Chain, states: torch.Tensor, tokens: list[int], path: list[int]
) -> torch.Tensor:
    """Of the token behind `path`, which hangs below the last of `tokens`."""
    head = head_of(chain)
    cache = KeyValueCache(head.config, 1, 100, torch.float32, torch.device("cpu"))
    rows = [(states, tokens[1:])] + [(None, [token]) for token in path]
    features = states
    for known, next_tokens in rows:
        attend = attend_causally(head, cache.length, len(next_tokens))
        read = known if known is not None else features[-1:]
        features = head.forward(torch.tensor(next_tokens), read, cache.layers[0], attend)
        cache.keep(range(len(next_tokens)))
    return chain.engine.models.target.lm_head(features[-1:])[0].log_softmax(-1)


def expected_paths(
    chain: Chain, states: torch.Tensor, tokens: list[int], tree: Tree
) -> set[tuple[int, ...]]:
    """EAGLE-2's definition: expand the best of each level, keep the best of all."""
    beam: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    pool: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(tree.depth):
        level = []
        for score, path in beam:
            best = log_probabilities(chain, states, tokens, list(path)).topk(tree.top_k)
            level += [
                (score + value, (*path, token))
                for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ]
        pool += level
        beam = sorted(level, reverse=True)[: tree.top_k]
    # A child that is certain scores as its parent does: the parent comes first.
    best_first = sorted(pool, key=lambda scored: (-scored[0], len(scored[1])))
    return {path for _, path in best_first[: tree.rows - 1]}


@torch.inference_mode()
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_tree_is_eagle_2s(chain: Chain, tree: Tree) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (12,)).tolist()
    states = states_of(chain, tokens[:-1])
    drafter = make_drafter(chain, tree)
    # Read in three goes, one of them taken back: the tree must not tell.
    drafter.observe(states[:6])
    drafter.draft([*tokens[:6], 63], tree.depth)
    drafter.observe(states[:3])
    drafter.rewind(6)
    drafter.observe(states[6:])
    drafted = drafter.draft(tokens, tree.depth)
    paths = {()}
    for row in range(1, len(drafted)):
        path = [row]
        while drafted.parents[path[0]] > 0:
            path.insert(0, drafted.parents[path[0]])
        paths.add(tuple(drafted.tokens[node] for node in path))
    assert paths - {()} == expected_paths(chain, states, tokens, tree)
    assert len(drafted) == min(tree.rows, 1 + tree.top_k + (tree.depth - 1) * tree.top_k**2)


@torch.inference_mode()
def test_depth_is_limited(chain: Chain) -> None:
    drafter = make_drafter(chain, Tree(depth=4, top_k=2, rows=15))
    tokens = [1, 2, 3, 4]
    drafter.observe(states_of(chain, tokens[:-1]))
    for max_depth in (4, 2, 1, 0):
        assert max(drafter.draft(tokens, max_depth).depths()) == max_depth
        drafter.rewind(len(tokens) - 1)


@torch.inference_mode()
def test_nothing_to_draft_from_gives_the_root_alone(chain: Chain) -> None:
    drafter = make_drafter(chain, Tree(depth=4, top_k=2, rows=15))
    assert drafter.draft([9], 4).tokens == [9]
