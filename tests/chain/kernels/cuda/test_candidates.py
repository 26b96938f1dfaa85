"""Kernels that choose and walk, against PyTorch's operations, and compiled for GPUs."""

import dataclasses

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from polybasic.chain.kernels.cuda import candidates, tree_kernels
from polybasic.chain.kernels.torch import trees
from polybasic.chain.kernels.torch.operations import Operations
from polybasic.chain.kernels.torch.trees import DeviceTree
from tests.chain.kernels.cuda.compiling import CAPABILITIES, Request, compiled
from tests.chain.kernels.cuda.early_access import touched_before_wait

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tied_logits(rows: int, outputs: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Of which many are equal, the greatest too."""
    logits = torch.randint(-40, 12, (rows, outputs), generator=generator(seed)) / 4
    return logits.to(DEVICE, dtype)


def first_best(values: Tensor, k: int) -> Tensor:
    """Places of the best, of equal ones the first first."""
    return values.float().sort(dim=-1, descending=True, stable=True).indices[..., :k]


@pytest.mark.parametrize(
    ("rows", "outputs", "k", "dtype"),
    [
        (1, 7, 7, torch.float32),
        (3, 1000, 10, torch.float32),
        (3, 1000, 10, torch.float16),
        (3, 1000, 10, torch.bfloat16),
        (2, 1025, 4, torch.bfloat16),
        (4, 5000, 1, torch.float16),
        (2, 2050, 64, torch.bfloat16),
        (1, 70_000, 10, torch.float16),
    ],
)
def test_the_best_of_each_row(rows: int, outputs: int, k: int, dtype: torch.dtype) -> None:
    logits = tied_logits(rows, outputs, dtype)
    scores, found = candidates.best(logits, k)
    assert found.dtype == torch.int64
    assert torch.equal(found, first_best(logits, k))
    torch.testing.assert_close(scores, Operations().best(logits, k)[0], rtol=1e-6, atol=1e-5)
    assert torch.equal(candidates.most_probable(logits), found[:, 0])


def test_rows_may_lie_apart() -> None:
    logits = tied_logits(4, 3000, torch.float32)[:, :1200]
    assert torch.equal(candidates.best(logits, 5)[1], first_best(logits, 5))


def test_logits_of_minus_infinity_come_last_and_once() -> None:
    logits = torch.full((2, 2100), float("-inf"), device=DEVICE)
    logits[0, 2099], logits[0, 3], logits[1, 1024] = 1.0, 1.0, 2.0
    scores, found = candidates.best(logits, 4)
    assert found.tolist() == [[3, 2099, 0, 1], [1024, 0, 1, 2]]
    expected = Operations().best(logits, 4)[0]
    torch.testing.assert_close(scores, expected)
    assert scores[:, 2:].isneginf().all()


def test_no_number_leads_out_of_the_vocabulary() -> None:
    logits = torch.full((2, 1030), float("nan"), device=DEVICE)
    logits[1, 5] = 3.0
    found = candidates.best(logits, 9)[1]
    assert 0 <= int(found.min()) <= int(found.max()) < 1030
    assert candidates.most_probable(logits)[1] == 5
    for operations in (candidates, Operations()):
        assert operations.best(logits[:1], 9)[0].isneginf().all()


def test_scores_never_rise_along_a_path() -> None:
    """Else a tree could keep a child without its parent."""
    logits = torch.full((3, 1500), -50.0, device=DEVICE)
    logits[:, 7] = 60.0
    above = torch.tensor([-0.1, -3.3, 0.0], device=DEVICE)
    scores, tokens = candidates.continuations(logits, 2, above, None)
    assert torch.equal(scores[::2], above)
    assert tokens[::2].tolist() == [7, 7, 7]


@pytest.mark.parametrize("is_trimmed", [False, True])
def test_continuations(is_trimmed: bool) -> None:
    logits = torch.randn(4, 1300, generator=generator(1)).to(DEVICE)
    above = -torch.rand(4, generator=generator(2)).to(DEVICE)
    token_ids = torch.randperm(9000, generator=generator(3))[:1300].to(DEVICE)
    given = above, token_ids if is_trimmed else None
    found, expected = candidates, Operations()
    for part, other in zip(
        found.continuations(logits, 6, *given), expected.continuations(logits, 6, *given),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(part, other, rtol=1e-6, atol=1e-5)
    alone = candidates.continuations(logits, 6, None, None)[0]
    torch.testing.assert_close(alone, candidates.best(logits, 6)[0].flatten())


@pytest.mark.parametrize(
    ("top_k", "width", "num_seen"), [(1, 8, 1), (4, 700, 4), (10, 64, 50), (7, 520, 63)]
)
def test_the_next_beam(top_k: int, width: int, num_seen: int) -> None:
    scores = -torch.randperm(top_k**2, generator=generator(4)).float().to(DEVICE)
    scores[scores < -(top_k**2) + 2] = float("-inf")
    tokens = torch.randint(0, 1 << 40, (top_k**2,), generator=generator(5)).to(DEVICE)
    states = torch.randn(top_k, width, generator=generator(6)).to(DEVICE, torch.bfloat16)
    visible = (torch.rand(top_k, num_seen, generator=generator(7)) < 0.5).to(DEVICE)
    found = candidates.next_beam(scores, tokens, states, visible)
    for part, other in zip(found, trees.next_beam(scores, tokens, states, visible), strict=True):
        assert part.dtype == other.dtype
        assert torch.equal(part, other)


def test_equal_scores_of_a_beam_come_in_order() -> None:
    scores = tied_logits(1, 100, torch.float32)[0]
    states, visible = torch.zeros(10, 4).to(DEVICE), torch.eye(10, dtype=torch.bool).to(DEVICE)
    beam = candidates.next_beam(scores, torch.arange(100).to(DEVICE), states, visible)
    assert torch.equal(beam.places, first_best(scores, 10))


def random_candidates(
    top_k: int, levels: int, seed: int, is_tied: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """As an expansion makes them: tokens, scores that fall along paths, and beams."""
    source = generator(seed)

    def fall(*size: int) -> Tensor:
        if is_tied:
            return -torch.randint(0, 3, size, generator=source).float()
        return -torch.rand(size, generator=source)

    scores, beams = [fall(top_k)], []
    for _ in range(levels - 1):
        beam = first_best(scores[-1], top_k)
        beams.append(beam)
        scores.append((scores[-1][beam][:, None] + fall(top_k, top_k)).flatten())
    total = torch.cat(scores)
    tokens = torch.randint(0, 99_999, total.shape, generator=source)
    beams_LK = torch.stack(beams) if beams else torch.empty(0, top_k, dtype=torch.int64)
    return tokens.to(DEVICE), total.to(DEVICE), beams_LK.to(DEVICE)


@pytest.mark.parametrize(
    ("top_k", "levels", "rows"),
    [(1, 1, 2), (1, 5, 4), (3, 1, 9), (2, 4, 5), (10, 6, 40), (12, 4, 64)],
)
def test_kept_rows(top_k: int, levels: int, rows: int) -> None:
    given = random_candidates(top_k, levels, rows, is_tied=rows % 2 == 0)
    root = torch.tensor(5, device=DEVICE)
    found = tree_kernels.keep_best(top_k, *given, root, rows)
    for part, other in zip(found, trees.keep_best(top_k, *given, root, rows), strict=True):
        assert part.dtype == other.dtype
        assert torch.equal(part, other)
    assert len(found.tokens) == min(rows, len(given[0]) + 1)


def test_impossible_candidates_are_kept_after_their_parents() -> None:
    tokens, scores, beams = random_candidates(3, 3, 1)
    scores[2:] = float("-inf")
    root = torch.tensor(5, device=DEVICE)
    found = tree_kernels.keep_best(3, tokens, scores, beams, root, 12)
    for part, other in zip(
        found, trees.keep_best(3, tokens, scores, beams, root, 12), strict=True
    ):  # fmt: skip
        assert torch.equal(part, other)


def random_tree(num_rows: int, num_padding: int, seed: int) -> DeviceTree:
    """Of few tokens, with rows at its end that only fill up."""
    source = generator(seed)
    parents = [0] + [int(torch.randint(0, row, (), generator=source)) for row in range(1, num_rows)]
    parents += [0] * num_padding
    tokens = torch.randint(0, 3, (num_rows + num_padding,), generator=source)
    tokens[num_rows:] = -1
    depths = [0] * len(parents)
    ancestors = torch.eye(len(parents), dtype=torch.bool)
    for row in range(1, num_rows):
        depths[row] = depths[parents[row]] + 1
        ancestors[row] |= ancestors[parents[row]]
    parts = tokens, torch.tensor(parents), torch.tensor(depths), ancestors
    return DeviceTree(*(part.to(DEVICE) for part in parts))


@pytest.mark.parametrize(
    ("num_rows", "stop_tokens"), [(1, []), (2, [2]), (17, [9, 0, 7]), (17, []), (64, [2])]
)
def test_walks(num_rows: int, stop_tokens: list[int]) -> None:
    stops = torch.tensor(stop_tokens, dtype=torch.int64, device=DEVICE)
    lengths = set()
    for seed in range(12):
        tree = random_tree(num_rows, seed % 3, seed)
        drawn = torch.randint(0, 3, (len(tree.tokens),), generator=generator(seed)).to(DEVICE)
        limit = torch.tensor(1 + seed % 7, device=DEVICE)
        most = int(tree.depths.max()) + 1
        found = tree_kernels.walk(tree, drawn, limit, stops, most)
        expected = trees.walk(tree, drawn, limit, stops, most)
        num = int(expected.num)
        assert int(found.num) == num
        assert found.num.shape == ()
        assert torch.equal(found.path[:num], expected.path[:num])
        assert torch.equal(found.gained[:num], expected.gained[:num])
        assert len(found.path) == len(found.gained) == most
        assert 0 <= int(found.path.min()) <= int(found.path.max()) < num_rows
        lengths.add(num)
    assert len(lengths) > 1 or num_rows == 1


MODULE = "polybasic.chain.kernels.cuda.candidates"
TREES = "polybasic.chain.kernels.cuda.tree_kernels"

SIZES = {"stride": "i32", "num_outputs": "i32"}
FOUND = {"found": "*fp32", "found_at": "*i32"}
SOFTMAX = {"most": "*fp32", "total": "*fp32"}
TREE = {"tokens": "*i64", "parents": "*i64"}
KEPT = {
    **TREE, "scores": "*fp32", "beams": "*i64", "root": "*i64", "row_tokens": "*i64",
    "depths": "*i64", "ancestors": "*i1", "num_candidates": "i32", "num_rows": "i32",
}  # fmt: skip
REQUESTS = {
    "search 32k": Request(
        MODULE, "search_chunks", {"logits": "*bf16", **SIZES, **FOUND, **SOFTMAX},
        {"k": 10, "CHUNK": 1024}, options={"num_warps": 4},
    ),
    "search 128k": Request(
        MODULE, "search_chunks", {"logits": "*bf16", **SIZES, **FOUND, **SOFTMAX},
        {"k": 10, "CHUNK": 2048}, options={"num_warps": 4},
    ),
    "most probable": Request(
        MODULE, "search_chunks", {"logits": "*fp16", **SIZES, **FOUND},
        {"k": 1, "CHUNK": 1024, "most": None, "total": None}, options={"num_warps": 4},
    ),
    "merge": Request(
        MODULE, "merge_chunks",
        {
            **FOUND, **SOFTMAX, "above": "*fp32", "token_ids": "*i64", "scores": "*fp32",
            "tokens": "*i64", "num_chunks": "i32", "num_outputs": "i32",
        },
        {"k": 10, "CHUNKS": 64, "FOUND": 1024}, ("above", "num_chunks"), options={"num_warps": 4},
    ),
    "beam": Request(
        MODULE, "take_beam",
        {
            "scores": "*fp32", "tokens": "*i64", "states": "*bf16", "visible": "*i1",
            "places": "*i64", "beam_scores": "*fp32", "beam_tokens": "*i64",
            "beam_states": "*bf16", "beam_visible": "*i1", "width": "i32", "num_seen": "i32",
        },
        {"K": 10, "CANDIDATES": 128, "BLOCK": 512, "COLUMNS": 64}, ("num_seen",),
        options={"num_warps": 1},
    ),
    "keep": Request(
        TREES, "keep_rows", KEPT, {"K": 10, "LEVELS": 6, "CANDIDATES": 512, "ROWS": 64},
        ("root", "num_candidates"),
        options={"num_warps": 4},
    ),
    "keep most": Request(
        TREES, "keep_rows", KEPT, {"K": 32, "LEVELS": 8, "CANDIDATES": 8192, "ROWS": 64},
        ("root", "num_rows"),
        options={"num_warps": 8},
    ),
    "walk": Request(
        TREES, "walk_rows",
        {
            **TREE, "drawn": "*i64", "limit": "*i64", "stop_tokens": "*i64", "path": "*i64",
            "gained": "*i64", "num": "*i64", "num_rows": "i32", "num_stops": "i32",
        },
        {"MOST": 7, "ROWS": 64, "STOPS": 2}, ("limit", "gained", "num", "num_stops"),
        options={"num_warps": 1},
    ),
}  # fmt: skip


@pytest.mark.proof
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_fit_a_gpu(capability: int) -> None:
    is_early = capability == 90
    asked = [
        dataclasses.replace(
            request,
            capability=capability,
            constants={
                **request.constants,
                **({"IS_EARLY": is_early} if request.module == MODULE else {}),
            },
        )
        for request in REQUESTS.values()
    ]
    kernels = dict(zip(REQUESTS, compiled(asked), strict=True))
    for name, kernel in kernels.items():
        assert kernel.stack_bytes == 0, f"{name} spills"
        assert kernel.shared_bytes <= 48 * 1024, name
        assert "atom" not in kernel.ptx.lower(), name
        waits = kernel.ptx.count("griddepcontrol.wait;")
        assert waits == (is_early and REQUESTS[name].module == MODULE), name
        if waits:
            assert touched_before_wait(kernel) == (set(), set()), name
    # 16 bytes of logits at once
    assert kernels["search 32k"].count("LDG.E.128") >= 1
