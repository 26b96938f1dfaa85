"""Products and drafts over a part of the vocabulary: the numbers of the whole, and no more."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from polybasic.chain.formats.checkpoints.block_types import BLOCK_TYPES
from polybasic.chain.kernels.cpu.matrices import NativeLinear
from polybasic.chain.kernels.executor import DraftRequest, Executor
from polybasic.chain.kernels.selection import backend_for
from polybasic.chain.kernels.shortlist import UNIT_TOKENS, Shortlist, addresses
from tests.chain.native_models import (
    CONFIG,
    CPU,
    cache_of,
    decoder,
    drafting,
    random_blocks,
    random_quantized,
    states_before_draft,
    threads,
)

pytestmark = pytest.mark.processor
NUM_OUTPUTS, NUM_INPUTS, NUM_ROWS = 600, 256, 30


def shortlist_of(*units: int, vocab_size: int = NUM_OUTPUTS) -> Shortlist:
    shortlist = Shortlist(vocab_size)
    shortlist.units[:] = 0
    shortlist.add(UNIT_TOKENS * unit for unit in units)
    return shortlist


def listed(shortlist: Shortlist, vocab_size: int = NUM_OUTPUTS) -> Tensor:
    return torch.from_numpy(np.repeat(shortlist.units, UNIT_TOKENS)[:vocab_size]).bool()


def product_of(kind: str) -> NativeLinear:
    generator, backend = torch.Generator().manual_seed(3), backend_for(CPU, torch.bfloat16)
    if kind == "int4":
        return backend.int4(random_quantized(generator, NUM_OUTPUTS, NUM_INPUTS))
    if kind == "dense":
        return backend.dense(torch.randn(NUM_OUTPUTS, NUM_INPUTS, generator=generator).bfloat16())
    parts = [
        random_blocks(generator, name, num, NUM_INPUTS)
        for name, num in ((kind, 336), ("Q8_0", NUM_OUTPUTS - 336))
    ]
    return backend.blocks(parts)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("kind", ["dense", "int4", *BLOCK_TYPES])
def test_a_row_has_the_products_of_its_list(kind: str, num_threads: int) -> None:
    product = product_of(kind)
    x = torch.randn(NUM_ROWS, NUM_INPUTS, generator=torch.Generator().manual_seed(5)).bfloat16()
    whole = product(x)
    lists = [shortlist_of(0, 2, 3), None, shortlist_of(9), shortlist_of()]
    num_rows = [7, 2, 20, 1]
    for chosen in ([0], [2], [0, 2, 3], [0, 1, 2, 3]):
        rows = torch.cat(
            [torch.arange(sum(num_rows[:place]), sum(num_rows[: place + 1])) for place in chosen]
        )
        of_rows = addresses([lists[place] for place in chosen], [num_rows[i] for i in chosen])
        with threads(num_threads):
            found = product(x[rows], of_rows)
        for place, part in zip(chosen, found.split([num_rows[i] for i in chosen]), strict=True):
            shortlist = lists[place]
            own = torch.arange(sum(num_rows[:place]), sum(num_rows[: place + 1]))
            has = torch.ones(NUM_OUTPUTS).bool() if shortlist is None else listed(shortlist)
            assert torch.equal(part[:, has], whole[own][:, has])
            assert torch.isneginf(part[:, ~has]).all()


def request_after(model: Executor, seed: int, shortlist: Shortlist | None) -> DraftRequest:
    """A draft after a text of its own."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, CONFIG.vocab_size, (10 + seed,), generator=generator)
    features = torch.randn(len(ids), CONFIG.hidden_size, generator=generator)
    cache = cache_of(model, len(model.weights.layers))
    state = states_before_draft(model, cache, ids, features, 4)
    state = state[-1:] if model.max_levels is None else state
    start = len(ids)
    return DraftRequest(state, cache.layers, start, 4, 3, shortlist=shortlist)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("kind", ["model", "head", "block head"])
def test_a_draft_has_the_tokens_of_its_list_alone_and_in_company(
    kind: str, num_threads: int
) -> None:
    model, size = drafting(kind), CONFIG.vocab_size
    shortlists = [shortlist_of(unit, vocab_size=size) for unit in (0, 1)]
    given = [(1, shortlists[0]), (2, None), (3, shortlists[1])]
    alone = [model.drafts([request_after(model, *one)])[0] for one in given]
    with threads(num_threads):
        together = model.drafts([request_after(model, *one) for one in given])
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.scores, other.scores)
    assert (alone[0].tokens < UNIT_TOKENS).all()
    assert (alone[2].tokens >= UNIT_TOKENS).all()
    assert alone[1].tokens.min() < UNIT_TOKENS <= alone[1].tokens.max()
    every = model.drafts([request_after(model, 2, shortlist_of(0, 1, vocab_size=size))])[0]
    assert torch.equal(every.scores, alone[1].scores)


def test_scores_are_those_of_a_head_over_these_tokens() -> None:
    model, size = drafting("model"), CONFIG.vocab_size
    ids = torch.arange(UNIT_TOKENS)
    weight = model.weights.lm_head(torch.eye(CONFIG.hidden_size)).T[ids]
    small = model.over(
        replace(
            model.weights,
            lm_head=backend_for(CPU, torch.float32, CONFIG).dense(weight),
            draft_token_ids=ids,
        )
    )
    expected = small.drafts([request_after(small, 4, None)])[0]
    found = model.drafts([request_after(model, 4, shortlist_of(0, vocab_size=size))])[0]
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.allclose(found.scores, expected.scores, atol=1e-5)


def test_which_models_leave_tokens_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polybasic.chain.kernels.shortlist._LEAST_VOCABULARY", CONFIG.vocab_size)
    model, head = decoder(torch.float32), drafting("head")
    assert model.shortlist() is None, "nobody checks a target's tokens"
    checked = model.over(replace(model.weights, is_checked=True))
    assert checked.shortlist() is not None
    assert checked.shortlist() is not checked.shortlist()
    capped = replace(checked.weights, logit_softcap=30.0)
    assert model.over(capped).shortlist() is None
    assert head.shortlist() is not None
    assert drafting("trimmed head").shortlist() is None
    monkeypatch.undo()
    assert checked.shortlist() is None, "the vocabulary is small"


def test_a_list_has_what_is_frequent_and_what_was_seen() -> None:
    shortlist = Shortlist(1000)
    assert 0 in shortlist
    assert 447 in shortlist
    assert 448 not in shortlist
    shortlist.add([999, 500])
    assert 999 in shortlist
    assert 448 in shortlist, "listed in units"
    assert 600 not in shortlist
    assert shortlist.share == (7 + 2) / 16
    assert shortlist.left_out(1000).tolist() == [token not in shortlist for token in range(1000)]


def test_texts_that_need_ever_more_rare_tokens_get_all() -> None:
    rare = range(100 * UNIT_TOKENS, 120 * UNIT_TOKENS, UNIT_TOKENS)
    few, many = Shortlist(200 * UNIT_TOKENS), Shortlist(200 * UNIT_TOKENS)
    for token in rare:
        few.add([token, *range(17)])
        many.add([token, *range(11)])
    assert few.share == (100 + 20) / 200
    assert many.share == 1.0
    at_once = Shortlist(200 * UNIT_TOKENS)
    at_once.add(rare)
    assert at_once.share == 1.0
