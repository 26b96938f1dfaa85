"""Draws, walks and cuts on the device against the host's, as functions of uniform numbers."""

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polybasic.chain.kernels import drafts as host_tree
from polybasic.chain.kernels.drafts import DraftTree
from polybasic.chain.kernels.torch.operations import Operations
from polybasic.chain.kernels.torch.trees import DeviceTree, num_to_stop
from polybasic.deploy.runtime.graphs.device_sampling import verify, verify_greedy
from polybasic.deploy.runtime.rounds import verification
from polybasic.deploy.runtime.rounds.sampling import GreedyRows, GreedySampler, Sampling
from polybasic.deploy.runtime.rounds.stopping import cut_at_end
from polybasic.deploy.runtime.rounds.warping import Warping
from tests.deploy.recorded_graphs import RecordedGraphs

CPU = torch.device("cpu")
draw, walk = Operations().draw, Operations().walk
HIGHEST = 1 - 2.0**-24
"""The greatest number that `torch.rand` gives."""


def midpoints(count: int) -> Tensor:
    """Uniform numbers that stand for all of [0, 1)."""
    return ((torch.arange(count, dtype=torch.float64) + 0.5) / count).float()


@pytest.mark.parametrize("vocab_size", [3, 1000, 1024, 2500])
def test_a_draw_has_the_law_of_its_row(vocab_size: int) -> None:
    """Over uniform numbers at equal distances each token comes as often as its share says."""
    generator = torch.Generator().manual_seed(2)
    row = torch.randn(vocab_size, generator=generator).mul(2).softmax(0)
    row[torch.rand(vocab_size, generator=generator) < 0.3] = 0
    row[0] = 0
    count = 5_000
    drawn = draw(5 * row.expand(count, -1), midpoints(count))
    shares = torch.bincount(drawn, minlength=vocab_size) / count
    assert (shares - row / row.sum()).abs().max() < 1.5 / count
    assert not shares[row == 0].any()
    assert bool((drawn.diff() >= 0).all()), "inversion keeps the order of the numbers"


def test_no_number_draws_a_token_of_probability_0() -> None:
    rows = torch.zeros(3, 3000)
    rows[0, 0] = rows[1, 1500] = rows[2, 2047] = 1.0
    for uniform in (0.0, 0.5, HIGHEST):
        assert draw(rows, torch.full((3,), uniform)).tolist() == [0, 1500, 2047]
    tiny = torch.full((1, 3000), 1e-7)
    tiny[0, 2000:] = 0
    assert draw(tiny, torch.tensor([HIGHEST])).tolist() == [1999]
    # where nothing can be drawn a token comes all the same
    assert draw(torch.zeros(1, 5), torch.tensor([0.3])).tolist() == [0]
    assert 0 <= int(draw(torch.full((1, 5), float("nan")), torch.tensor([0.3]))) < 5


@st.composite
def trees(draw_from: Any) -> DraftTree:
    """Of few tokens, so that draws often find a child; no row has two children of one token."""
    tokens, parents = [draw_from(st.integers(0, 3))], [-1]
    for _ in range(draw_from(st.integers(0, 11))):
        parent, token = draw_from(st.integers(0, len(tokens) - 1)), draw_from(st.integers(0, 3))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return DraftTree(tokens, parents)


def padded(tree: DeviceTree, num_rows: int) -> DeviceTree:
    """With rows that only fill up."""
    own = len(tree.tokens)
    kept = DeviceTree(
        torch.full((num_rows,), -1),
        torch.zeros(num_rows, dtype=torch.int64),
        torch.zeros(num_rows, dtype=torch.int64),
        torch.eye(num_rows, dtype=torch.bool),
    )
    kept.tokens[:own], kept.parents[:own], kept.depths[:own] = (
        tree.tokens,
        tree.parents,
        tree.depths,
    )
    kept.ancestors[:own, :own] = tree.ancestors
    return kept


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.data())
def test_walks_are_the_hosts(data: st.DataObject) -> None:
    tree = data.draw(trees())
    drawn = data.draw(st.lists(st.integers(0, 4), min_size=len(tree), max_size=len(tree)))
    limit, stop_tokens = data.draw(st.integers(1, 6)), data.draw(st.sets(st.integers(0, 4)))
    path, last_token = host_tree.walk(tree, lambda row: drawn[row])
    gained = [tree.tokens[row] for row in path[1:]] + [last_token]
    expected, _ = cut_at_end(gained, limit, stop_tokens)
    most = max(tree.depths()) + 1 + data.draw(st.integers(0, 2))
    moved = padded(DeviceTree.of(tree, CPU), len(tree) + data.draw(st.integers(0, 3)))
    num_padding = len(moved.tokens) - len(tree)
    found = walk(
        moved,
        torch.tensor(drawn + [drawn[0]] * num_padding),
        torch.tensor(limit),
        torch.tensor(sorted(stop_tokens), dtype=torch.int64),
        most,
    )
    num = int(found.num)
    assert found.gained[:num].tolist() == expected
    assert found.path[:num].tolist() == path[:num]
    assert len(found.path) == len(found.gained) == most
    assert 0 <= int(found.path.min()) <= int(found.path.max()) < len(tree)


def test_tokens_are_cut_at_the_first_stop() -> None:
    tokens, stop_tokens = torch.tensor([4, 7, 5, 7, 9]), torch.tensor([7, 9])
    counts = [int(num_to_stop(tokens, torch.tensor(num), stop_tokens)) for num in range(1, 6)]
    assert counts == [1, 2, 2, 2, 2]
    assert int(num_to_stop(tokens, torch.tensor(4), torch.tensor([9, 3]))) == 4
    assert int(num_to_stop(tokens, torch.tensor(5), torch.empty(0, dtype=torch.int64))) == 5


def random_block(
    generator: torch.Generator, num_tokens: int, size: int, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [size], p [size + 2, V] and q [size, V]; beyond the block's own, arbitrary numbers.

    Many probabilities are 0, many ratios are above 1, and some rows of p and q agree.
    """
    q = torch.randn(size, vocab_size, generator=generator).mul(2).softmax(1)
    p = torch.randn(size + 2, vocab_size, generator=generator).mul(2).softmax(1)
    p[torch.rand(p.shape, generator=generator) < 0.2] = 0
    q[torch.rand(q.shape, generator=generator) < 0.2] = 0
    p += 1e-3 * torch.eye(vocab_size)[0]
    q += 1e-3 * torch.eye(vocab_size)[0]
    is_equal = torch.rand(size, generator=generator) < 0.3
    p[:size][is_equal] = q[is_equal]
    p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    tokens = torch.multinomial(q, 1, generator=generator)[:, 0]
    tokens[num_tokens:] = 1 << 40
    if torch.rand((), generator=generator) < 0.5:
        p[num_tokens + 1 :], q[num_tokens:] = float("nan"), float("nan")
    return tokens, p, q


def cut_by_host(
    tokens: list[int], p: Tensor, q: Tensor, uniforms: list[float], rule: str
) -> tuple[int, Tensor, float]:
    """Kept tokens, distribution after them, and how near a uniform number came to its limit."""
    numbers, margins = iter(uniforms), [1.0]

    def happens(probabilities: list[float]) -> list[bool]:
        drawn = [(next(numbers), probability) for probability in probabilities]
        margins.extend(abs(number - probability) for number, probability in drawn)
        return [number < probability for number, probability in drawn]

    num_kept, following = verification.cut(tokens, p, q, rule, happens)
    return num_kept, following, min(margins)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_cuts_are_the_hosts(rule: str) -> None:
    generator = torch.Generator().manual_seed(3)
    kept: Counter[int] = Counter()
    for case in range(300):
        num_tokens, size = case % 7, 6
        tokens, p, q = random_block(generator, num_tokens, size, 9)
        uniforms = torch.rand(size + 1, generator=generator)
        own = uniforms[:num_tokens].tolist()
        doubles = p[: num_tokens + 1].double(), q[:num_tokens].double()
        expected, following, margin = cut_by_host(tokens[:num_tokens].tolist(), *doubles, own, rule)
        num_kept, next_token = verify(tokens, torch.tensor(num_tokens), p, q, uniforms, rule)
        if margin < 1e-5:
            continue
        kept[num_tokens - expected] += 1
        assert num_kept.shape == next_token.shape == ()
        assert int(num_kept) == expected
        if expected < num_tokens and torch.equal(p[expected], q[expected]):
            continue  # of probability 0 but for rounding
        cumulative = following.cumsum(0) / following.sum()
        target = float(uniforms[size])
        assert int(next_token) in {
            int(torch.searchsorted(cumulative, target + shift, right=True))
            for shift in (-1e-5, 0.0, 1e-5)
        }
        assert float(following[next_token]) > 0
    assert kept[0] > 50
    assert sum(kept.values()) - kept[0] > 50


def test_block_weights_stay_exact_over_long_blocks() -> None:
    """Ratios far above and below 1 in turn, where sums of logarithms are largest."""
    most, vocab_size = 24, 4
    p, q = torch.full((most + 1, vocab_size), 0.25), torch.full((most, vocab_size), 0.25)
    p[0:most:2, 1], q[1:most:2, 1] = 1e-9, 1e-9
    p[most - 1, 1] *= 0.37
    tokens = torch.ones(most, dtype=torch.int64)
    expected = verification.block_weights(p.double(), q.double(), tokens.tolist())
    assert abs(expected[-1] - 0.37) < 1e-6
    for uniform, is_kept in ((expected[-1] - 1e-4, True), (expected[-1] + 1e-4, False)):
        uniforms = torch.full((most + 1,), float(uniform))
        num_kept, _ = verify(tokens, torch.tensor(most), p, q, uniforms, "block")
        assert (int(num_kept) == most) == is_kept


def test_greedy_cuts_are_the_hosts() -> None:
    sampler, generator = GreedySampler(Sampling(), 0), torch.Generator().manual_seed(4)
    found: Counter[tuple[int, int]] = Counter()
    for case in range(100):
        num_tokens = case % 6
        tokens, own = torch.randint(0, 2, (2, 6), generator=generator)
        tokens = tokens[:5]
        block, rows = tokens[:num_tokens].tolist(), GreedyRows(own.tolist())
        expected = sampler.verify(block, GreedyRows([]), rows)
        num_kept, next_token = verify_greedy(tokens, torch.tensor(num_tokens), own)
        assert (int(num_kept), int(next_token)) == expected
        found[expected] += 1
    assert len(found) >= 8


def test_one_graph_serves_all_values() -> None:
    """Nothing of a round is read by the host, and other numbers give other results."""
    generator = torch.Generator().manual_seed(5)
    most, vocab_size = 4, 1100
    logits = torch.randn(most + 1, vocab_size, generator=generator)
    values = torch.zeros(Warping.NUM_VALUES)
    tree = DeviceTree.of(DraftTree([1, 0, 1, 0, 1], [-1, 0, 0, 1, 1]), CPU)
    warping = Warping.of(Sampling(temperature=1, top_k=7, top_p=0.9, min_p=0.1))
    probabilities = partial(warping.probabilities, operations=Operations())
    uniforms, numbers = torch.zeros(most + 1), torch.zeros(2, dtype=torch.int64)
    tokens, stop_tokens = torch.zeros(most, dtype=torch.int64), torch.tensor([2, 3])
    left = torch.zeros(11, dtype=torch.int64)

    def round_() -> None:
        own = probabilities(logits, values)
        drawn = draw(own, uniforms)
        walked = walk(tree, drawn % 4, numbers[0], stop_tokens, 3)
        proposed = probabilities(logits[:most] * 0.5, values)
        cuts = [verify(tokens, numbers[1], own, proposed, uniforms, r) for r in ("token", "block")]
        greedy = verify_greedy(tokens, numbers[1], drawn)
        counted = [walked.num, *greedy, *cuts[0], *cuts[1]]
        left.copy_(torch.cat([walked.path, torch.stack(counted), walked.gained[:1]]))

    graphs, seen = RecordedGraphs(), set()
    for run in range(8):
        values.copy_(torch.tensor([0.5 + run / 4, 5 + run % 3, 0.95 - run / 40, 0.02]))
        uniforms.copy_(torch.rand(most + 1, generator=generator))
        numbers.copy_(torch.tensor([1 + run % 3, run % 5]))
        logits.normal_(generator=generator)
        tokens.copy_(draw(probabilities(logits[:most] * 0.5, values), uniforms[:most]))
        graphs.run("round", round_)
        replayed = left.clone()
        round_()
        assert torch.equal(left, replayed)
        seen.add(tuple(left.tolist()))
    assert len(seen) == 8


def test_equal_numbers_give_equal_draws() -> None:
    """Rows are drawn alone: what other rows of a pass hold changes nothing."""
    rows = torch.rand(4, 5000, generator=torch.Generator().manual_seed(6))
    uniforms = midpoints(4)
    alone = [int(draw(rows[r : r + 1], uniforms[r : r + 1])) for r in range(4)]
    assert draw(rows, uniforms).tolist() == alone
    exact = np.cumsum(rows.double().numpy(), 1)
    wanted = [np.searchsorted(c, float(u) * c[-1]) for c, u in zip(exact, uniforms, strict=True)]
    assert np.abs(np.array(alone) - np.array(wanted)).max() <= 1
