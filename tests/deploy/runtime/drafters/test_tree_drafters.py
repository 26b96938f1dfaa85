"""Drafts of heads and of independent models against their definition, without a shared cache."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.plan import Tree
from polybasic.chain.kernels.drafts import DraftTree, walk
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.rows import consecutive_rows
from polybasic.chain.model.loading import load_decoder, load_head
from polybasic.deploy.runtime.drafters.head import EagleDrafter
from polybasic.deploy.runtime.drafters.model import ModelDrafter
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from polybasic.deploy.runtime.rounds.verifier import Verifier
from tests.deploy.runtime.drafters.definitions import (
    CAPACITY,
    CASES,
    CPU,
    DRAFTED,
    Case,
    Models,
    best_paths,
    cache_of,
    dflash_case,
    over_all_tokens,
    paths_of,
    random_tokens,
)
from tests.head_kinds import trim

TREES = [
    Tree(depth=1, top_k=3, rows=3),
    Tree(depth=3, top_k=1, rows=4),
    Tree(depth=4, top_k=3, rows=12),
    Tree(depth=3, top_k=4, rows=30),
]


@pytest.fixture
def models(tiny_chain_parts: Any) -> Models:
    target, intermediate = (
        load_decoder(read_config(folder), torch.float32, CPU, CAPACITY)
        for folder in (tiny_chain_parts.target, tiny_chain_parts.intermediate)
    )
    return Models(
        target, intermediate, load_head(read_config(tiny_chain_parts.draft), target, CAPACITY)
    )


@pytest.fixture(params=["head", "model", "trimmed head", *CASES])
def case(
    request: pytest.FixtureRequest, models: Models, tiny_chain_parts: Any, tmp_path: Path
) -> Case:
    target, head = models.target, models.head
    if make_case := CASES.get(request.param):
        return make_case(target, tmp_path / "head", tiny_chain_parts.target, request.param)

    def of_head_feature(states: Tensor, tokens: list[int], path: list[int]) -> Tensor:
        cache = KeyValueCache(head.config, 1, CAPACITY, torch.float32, CPU)
        rows = [(states, tokens[1:])] + [(None, [token]) for token in path]
        features = states
        for known, next_tokens in rows:
            seen = [consecutive_rows(cache.length, len(next_tokens))]
            read = known if known is not None else features[-1:]
            features = head.forward(torch.tensor(next_tokens), [cache.layers], seen, read)
            cache.keep(range(len(next_tokens)))
        return features[-1:]

    def of_head(states: Tensor, tokens: list[int], path: list[int]) -> Tensor:
        return target.weights.lm_head(of_head_feature(states, tokens, path))[0].log_softmax(-1)

    def of_model(states: Tensor, tokens: list[int], path: list[int]) -> Tensor:
        read = Verifier("target", target, cache_of(target)).read([*tokens, *path])
        return target.logits(read[-1:])[0].log_softmax(-1)

    def of_trimmed(states: Tensor, tokens: list[int], path: list[int]) -> Tensor:
        of_drafted = target.weights.lm_head(of_head_feature(states, tokens, path))[0, DRAFTED]
        return over_all_tokens(of_drafted.log_softmax(-1), DRAFTED)

    if request.param == "trimmed head":
        trim(tiny_chain_parts.draft, DRAFTED)
        trimmed = load_head(read_config(tiny_chain_parts.draft), target, CAPACITY)
        return Case(target, lambda tree: EagleDrafter(trimmed, tree, CAPACITY), of_trimmed)
    if request.param == "head":
        return Case(target, lambda tree: EagleDrafter(head, tree, CAPACITY), of_head)
    return Case(target, lambda tree: ModelDrafter(target, tree, CAPACITY), of_model)


def expected_paths(
    case: Case, states: Tensor, tokens: list[int], tree: Tree
) -> set[tuple[int, ...]]:
    return best_paths(lambda path: case.log_probabilities(states, tokens, path), tree)


@torch.inference_mode()
def test_tree_is_eagle_2s(case: Case) -> None:
    torch.manual_seed(0)
    tree = Tree(depth=4, top_k=3, rows=12)
    tokens = random_tokens(12)
    states = case.states(tokens[:-1])
    drafter = case.make(tree)
    # Read in three steps, one of them rewound: the tree must be the same.
    drafter.observe(states[:6])
    drafter.draft([*tokens[:6], 63], tree.depth)
    drafter.observe(states[:3])
    drafter.rewind(6)
    drafter.observe(states[6:])
    drafted = drafter.draft(tokens, tree.depth)
    expected = expected_paths(case, states, tokens, tree)
    assert paths_of(drafted) == expected
    other = case.log_probabilities(states, [*tokens[:-1], tokens[-1] ^ 1], [])
    assert torch.equal(other, case.log_probabilities(states, tokens, [])) != case.reads_root
    if not case.reads_root:
        assert expected != expected_paths(case, states[:-1], tokens, tree)


@torch.inference_mode()
def test_scores_are_those_of_the_definition(case: Case) -> None:
    torch.manual_seed(3)
    tokens = random_tokens(11)
    states = case.states(tokens[:-1])
    drafter = case.make(Tree(depth=2, top_k=4, rows=5))
    drafter.observe(states)

    def defined(tokens: list[int]) -> Tensor:
        """Of the first level, and of the children of its best."""
        first = case.log_probabilities(states, tokens, []).topk(4)
        below = case.log_probabilities(states, tokens, [int(first.indices[0])]).topk(4)
        return torch.cat([first.values, first.values[0] + below.values])

    found = drafter.candidates(tokens, 2).scores[:8]
    torch.testing.assert_close(found, defined(tokens), rtol=1e-5, atol=1e-5)
    other = defined([*tokens[:-1], tokens[-1] ^ 1])
    assert torch.allclose(found, other, rtol=1e-3, atol=1e-3) != case.reads_root


@torch.inference_mode()
def test_depth_is_limited(case: Case) -> None:
    drafter = case.make(Tree(depth=4, top_k=2, rows=15))
    tokens = [1, 2, 3, 4]
    drafter.observe(case.states(tokens[:-1]))
    for max_depth, num_passes in ((9, 4), (4, 4), (2, 2), (1, 1), (0, 0)):
        drafter.clock.reset()
        assert max(drafter.draft(tokens, max_depth).depths()) == min(max_depth, 4)
        gives_all_at_once = drafter.model.max_levels is not None
        assert drafter.clock.num_passes == min(num_passes, 1 if gives_all_at_once else 4)
        drafter.rewind(len(tokens) - 1)


@torch.inference_mode()
@pytest.mark.parametrize("kernels", ["auto", "eager"])
def test_a_head_whose_states_overflow_drafts_a_tree(
    tiny_chain_parts: Any, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    """The weights of the random head let states grow with every level, at last beyond float32."""
    monkeypatch.setenv("POLYBASIC_KERNELS", kernels)
    folder = tiny_chain_parts.target
    target = load_decoder(read_config(folder), torch.float32, CPU, CAPACITY)
    head = load_head(read_config(tiny_chain_parts.draft), target, CAPACITY)
    drafter = EagleDrafter(head, Tree(depth=16, top_k=2, rows=12), CAPACITY)
    tokens = [1, 2, 3, 4]
    drafter.observe(Verifier("target", target, cache_of(target)).read(tokens[:-1]))
    candidates = drafter.candidates(tokens, 16)
    is_lost = candidates.scores.isneginf()
    assert is_lost.any(), "the states must overflow for this to mean something"
    assert not is_lost[:2].any()
    for rows in range(2, len(candidates.tokens) + 2):
        drafted = candidates.keep_best(tokens[-1], rows)
        assert all(parent < row for row, parent in enumerate(drafted.parents))
        assert max(drafted.depths()) <= 16
    finite = candidates.tokens[~is_lost].tolist()
    assert candidates.keep_best(tokens[-1], 1 + len(finite)).tokens[1:] == finite


@torch.inference_mode()
def test_the_tree_may_change_between_drafts(case: Case) -> None:
    torch.manual_seed(1)
    tokens = random_tokens(9)
    states = case.states(tokens[:-1])
    drafter = case.make(TREES[-1])
    drafter.observe(states)
    drafted = []
    for tree in [*TREES, *reversed(TREES)]:
        drafter = drafter.drafting(tree)
        assert drafter.tree == tree
        drafted.append(drafter.draft(tokens, tree.depth))
        assert paths_of(drafted[-1]) == expected_paths(case, states, tokens, tree)
        most = 1 + tree.top_k + (tree.depth - 1) * tree.top_k**2
        assert len(drafted[-1]) == min(tree.rows, most)
    assert drafted[: len(TREES)] == drafted[: len(TREES) - 1 : -1]
    assert len({len(tree) for tree in drafted}) == len(TREES)


@torch.inference_mode()
def test_candidates_go_deeper_than_the_tree_and_leave_the_drafts_as_they_are(case: Case) -> None:
    torch.manual_seed(2)
    tokens = random_tokens(9)
    drafter, deep = case.make(Tree(depth=2, top_k=3, rows=6)), Tree(depth=5, top_k=3, rows=20)
    drafter.observe(case.states(tokens[:-1]))
    before = drafter.draft(tokens, 2)
    candidates = drafter.candidates(tokens, deep.depth)
    assert candidates.num_levels == deep.depth
    expected = expected_paths(case, case.states(tokens[:-1]), tokens, deep)
    assert paths_of(candidates.keep_best(tokens[-1], deep.rows)) == expected
    assert drafter.draft(tokens, 2) == before
    assert max(before.depths()) == 2


MOVES = st.one_of(
    st.tuples(st.just("gain"), st.integers(1, 4), st.integers(0, 2**16)),
    st.tuples(st.just("cut"), st.integers(0, 9), st.integers(0, 2**16)),
    st.tuples(st.just("correct"), st.integers(1, 5), st.integers(0, 2**16)),
    st.tuples(st.just("draft"), st.integers(0, 4), st.just(0)),
)


@settings(
    derandomize=True,
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(moves=st.lists(MOVES, min_size=1, max_size=14))
def test_a_rewound_drafter_drafts_as_a_fresh_one(
    case: Case, moves: list[tuple[str, int, int]]
) -> None:
    tree = Tree(depth=3, top_k=3, rows=9)
    with torch.inference_mode():
        drafter = case.make(tree)
        tokens = [5, 6]
        observed = case.states(tokens[:-1])
        drafter.observe(observed)
        for move, amount, seed in [*moves, ("draft", 3, 0)]:
            torch.manual_seed(seed)
            if move == "draft":
                drafted = drafter.draft(tokens, amount)
                assert drafted.tokens[0] == tokens[-1]
                assert len(drafted) <= tree.rows
                assert (amount > 0) <= max(drafted.depths()) <= min(amount, tree.depth)
                assert len(paths_of(drafted)) == len(drafted) - 1
                continue
            if move == "gain":  # a round of the innermost stage: states that may be corrected
                added = torch.randn(amount, observed.shape[1])
                tokens = tokens + random_tokens(amount)
            elif move == "cut":  # a stage above kept fewer tokens and goes on with another
                length = max(1, len(observed) - amount)
                drafter.rewind(length)
                observed, added = observed[:length], observed[:0]
                tokens = tokens[:length] + random_tokens(1)
            else:  # the same tokens, states of a model above
                length = max(0, len(observed) - amount)
                drafter.rewind(length)
                added = torch.randn(len(observed) - length, observed.shape[1])
                observed = observed[:length]
            drafter.observe(added)
            observed = torch.cat([observed, added])
        fresh = case.make(tree)
        fresh.observe(observed)
        ours, theirs = drafter.candidates(tokens, 3), fresh.candidates(tokens, 3)
        assert torch.equal(ours.tokens, theirs.tokens)
        assert torch.equal(ours.beams, theirs.beams)
        torch.testing.assert_close(ours.scores, theirs.scores, atol=1e-4, rtol=1e-4)
        fresh.rewind(len(observed) - 1)
        fresh.observe(observed[-1:])
        other = fresh.candidates([*tokens[:-1], tokens[-1] ^ 1], 3)
        is_same = torch.allclose(other.scores, theirs.scores, atol=1e-4, rtol=1e-4)
        assert is_same != case.reads_root


@torch.inference_mode()
def test_a_head_without_a_state_drafts_nothing_and_a_model_does(models: Models) -> None:
    tree = Tree(depth=4, top_k=2, rows=15)
    head = EagleDrafter(models.head, tree, CAPACITY)
    assert head.draft([9], 4) == DraftTree.of_root(9)
    assert max(ModelDrafter(models.target, tree, CAPACITY).draft([9], 4).depths()) == 4


def accepted_lengths(target: Executor, drafter: ModelDrafter, num_rounds: int) -> list[int]:
    """Greedy rounds of the target over the drafter's trees."""
    verifier, tokens, lengths = Verifier("target", target, cache_of(target)), [3], []
    for _ in range(num_rounds):
        tree = drafter.draft(tokens, drafter.tree.depth)
        states = verifier.read_tree(tree)
        best = verifier.logits(states).argmax(-1).tolist()
        path, last_token = walk(tree, best.__getitem__)
        verifier.cache.keep(path)
        drafter.observe(states[path])
        tokens += [*(tree.tokens[row] for row in path[1:]), last_token]
        lengths.append(len(path))
    return lengths


@torch.inference_mode()
def test_a_model_accepts_its_own_first_choices_to_full_depth(models: Models) -> None:
    chain_of_five = Tree(depth=5, top_k=1, rows=6)
    own = ModelDrafter(models.target, chain_of_five, CAPACITY)
    assert accepted_lengths(models.target, own, 6) == [6] * 6
    wide = ModelDrafter(models.target, Tree(depth=5, top_k=4, rows=69), CAPACITY)
    assert min(accepted_lengths(models.target, wide, 6)) >= 2
    in_4_bits = ModelDrafter(models.intermediate, chain_of_five, CAPACITY)
    assert min(accepted_lengths(models.target, in_4_bits, 6)) < 6


@torch.inference_mode()
def test_a_model_reads_what_it_has_not_read_once(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_read: list[int] = []
    kind = type(models.target)
    forward = kind.forward

    def recording(self: Executor, token_ids: Tensor, *rest: object) -> Tensor:
        rows_read.append(len(token_ids))
        return forward(self, token_ids, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "forward", recording)
    drafter = ModelDrafter(models.target, Tree(depth=3, top_k=4, rows=9), CAPACITY)

    def rows_of_a_draft(tokens: list[int]) -> int:
        rows_read.clear()
        drafter.draft(tokens, 3)
        return rows_read[0]

    tokens = random_tokens(20)
    states = torch.zeros(20, models.target.config.hidden_size)
    drafter.observe(states[:9])
    assert rows_of_a_draft(tokens[:10]) == 10
    drafter.observe(states[:3])
    assert rows_of_a_draft(tokens[:13]) == 3
    drafter.rewind(8)
    assert rows_of_a_draft(tokens[:9]) == 1
    drafter.rewind(0)
    drafter.observe(states[:4])
    assert rows_of_a_draft(tokens[:5]) == 5


@torch.inference_mode()
def test_rows_of_a_block_see_what_their_layer_shows(
    models: Models, tiny_chain_parts: Any, tmp_path: Path
) -> None:
    """Windows hide what is long past; causal rows see none after them."""
    torch.manual_seed(4)
    tokens, found = random_tokens(14), []
    names = ("dflash", "dflash with a window", "dflash with a window that sees ahead")
    for name in (*names, "causal dflash"):
        case = dflash_case(models.target, tmp_path / name, tiny_chain_parts.target, name)
        states = case.states(tokens[:-1])
        drafter = case.make(Tree(depth=1, top_k=4, rows=5))
        drafter.observe(states)
        found.append(drafter.candidates(tokens, 1).scores)
        expected = case.log_probabilities(states, tokens, []).topk(4).values
        torch.testing.assert_close(found[-1], expected, rtol=1e-5, atol=1e-5)
    for drafted, other in combinations(found, 2):
        assert not torch.allclose(drafted, other, rtol=1e-3, atol=1e-3)
