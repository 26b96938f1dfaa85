"""Members that see a part of the context: what their rows see, and that answers stay the target's.

The definition is a pass over the whole text with a mask that says, column by column, what a row
sees; caches, blocks of a prompt, trees and drafts are held against it.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig, LayerKind
from polybasic.chain.formats.manifest import check_plan, read_manifest
from polybasic.chain.formats.plan import Flush, Ngram, Plan, Tree, Window
from polybasic.chain.kernels.drafts import DraftTree
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.torch import executor
from polybasic.chain.kernels.torch.executor import TorchExecutor
from polybasic.chain.kernels.torch.rows import DeviceRows, Span
from polybasic.deploy import load_chain
from polybasic.deploy.runtime.drafters.head import EagleDrafter
from polybasic.deploy.runtime.drafters.model import ModelDrafter
from polybasic.deploy.runtime.engine import Engine
from polybasic.deploy.runtime.models import Models
from polybasic.deploy.runtime.request import Request
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from polybasic.deploy.runtime.rounds.sampling import Sampling
from polybasic.deploy.runtime.rounds.verifier import Verifier
from tests.deploy.small_chains import CPU, VOCAB_SIZE, Weights, small_config

CAPACITY = 200
TREE = DraftTree([5, 1, 2, 3, 4, 5, 0], [-1, 0, 0, 1, 2, 2, 5])
WINDOWS = [None, Window(tokens=1, sinks=0), Window(tokens=3, sinks=2), Window(tokens=7)]
NARROW = Window(tokens=2, sinks=1)
LOCAL = LayerKind({"rope_type": "default", "rope_theta": 5000.0}, 6)
EVERYWHERE = LayerKind({"rope_type": "default", "rope_theta": 10000.0})


def config_of(family: str) -> DecoderConfig:
    """Heads of 16 are of a size that native kernels compute, those of 8 are not."""
    config = small_config(num_layers=2, hidden_size=64 if family.startswith("native") else 32)
    if family.endswith("plain"):
        return config
    changes: dict[str, Any] = {"layer_kinds": (LOCAL, EVERYWHERE)}
    if family.endswith("softcap"):
        changes["attention_softcap"] = 3.0
    return dataclasses.replace(config, **changes)


def decoder_of(family: str) -> Executor:
    return Weights(1).decoder(config_of(family))


def cache_of(decoder: Executor) -> KeyValueCache:
    config = decoder.config
    return KeyValueCache(config, config.num_layers, CAPACITY, torch.float32, CPU)


def sees(row: int, column: int, kind: LayerKind, window: Window | None) -> bool:
    """The definition, by position: of two windows the narrower one counts."""
    if column > row:
        return False
    if window is not None and (kind.window is None or window.tokens < kind.window):
        return column > row - window.tokens or column < window.sinks
    return kind.window is None or column > row - kind.window


class DefinedSpan(Span):
    """Sees what the definition says, of all rows that the pass has written."""

    is_whole_prompt = sees_all = False

    def of(self, cache: Tensor) -> Tensor:
        return cache[:, : self.rows.num_rows]

    def seen(self, capacity: int) -> Tensor:
        every, window = range(self.rows.num_rows), self.rows.window
        return torch.tensor(
            [[sees(row, column, self.kind, window) for column in every] for row in every]
        )


class DefinedRows(DeviceRows):
    def span_of(self, kind: LayerKind) -> Span:
        # with a window of its own, a span asks `seen` for all that it reads
        return DefinedSpan(self, kind, 1, 0)


def defined(decoder: Executor, tokens: Sequence[int], window: Window | None) -> Tensor:
    """States of a text that is read in one pass into an empty cache, by the reference."""
    positions = torch.arange(len(tokens))
    rows = DefinedRows(torch.tensor(0), positions, positions, None, window, 0)
    layers = cache_of(decoder).layers
    return TorchExecutor(decoder.weights).forward(torch.tensor(tokens), [layers], [rows])


def random_tokens(num_tokens: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (num_tokens,)).tolist()


@torch.inference_mode()
@pytest.mark.parametrize(
    "family", ["plain", "local", "softcap", "native plain", "native local", "native softcap"]
)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_rows_see_what_the_window_says(
    family: str, window: Window | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt in blocks, single tokens, a few tokens, a tree and what follows it."""
    monkeypatch.setattr(executor, "BLOCK_ROWS", 4)
    torch.manual_seed(0)
    decoder, tokens = decoder_of(family), random_tokens(17)
    verifier = Verifier("it", decoder, cache_of(decoder), window=window)
    expected, found = defined(decoder, tokens, window), []
    for first, end in ((0, 11), (11, 12), (12, 13), (13, 17)):
        found.append(verifier.read(tokens[first:end]))
        verifier.cache.keep(range(end - first))
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-4)
    states = verifier.read_tree(TREE)
    for row, path in enumerate(TREE.paths()):
        text = [*tokens, TREE.tokens[0], *path]
        torch.testing.assert_close(
            states[row], defined(decoder, text, window)[-1], rtol=1e-4, atol=1e-4
        )
    verifier.cache.keep([0, 2, 5, 6])
    text = [*tokens, *(TREE.tokens[row] for row in (0, 2, 5, 6)), 3]
    torch.testing.assert_close(
        verifier.read([3])[0], defined(decoder, text, window)[-1], rtol=1e-4, atol=1e-4
    )
    other = Window(tokens=4, sinks=2)
    assert not torch.allclose(expected, defined(decoder, tokens, other), rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_short_texts_are_read_as_without_a_window() -> None:
    torch.manual_seed(1)
    decoder, tokens = decoder_of("plain"), random_tokens(9)
    states = []
    for window in (None, Window(tokens=5, sinks=4)):
        verifier = Verifier("it", decoder, cache_of(decoder), window=window)
        states.append(verifier.read(tokens))
    assert torch.equal(*states)


@torch.inference_mode()
def test_a_long_prompt_takes_no_mask_of_all_rows_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "BLOCK_ROWS", 8)
    sizes: list[int] = []
    seen_by_rows = Span.seen

    def counted(span: Span, capacity: int) -> Tensor:
        found = seen_by_rows(span, capacity)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(Span, "seen", counted)
    for family, window in (("plain", Window(tokens=6)), ("local", None), ("plain", None)):
        decoder = decoder_of(family)
        verifier = Verifier("it", decoder, cache_of(decoder), window=window)
        sizes.clear()
        verifier.read(random_tokens(100))
        seen = {"plain": 4 + 6 + 8, "local": 100}[family]
        assert max(sizes, default=0) <= 8 * seen
        assert bool(sizes) == (window is not None or family == "local")


def head_paths(
    decoder: Executor, tree: Tree, tokens: list[int], window: Window | None
) -> set[tuple[int, ...]]:
    """The tree that a small model drafts, by the definition of expanding and of the window."""
    beam: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    pool: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(tree.depth):
        level = []
        for score, path in beam:
            state = defined(decoder, [*tokens, *path], window)[-1:]
            best = decoder.logits(state)[0].log_softmax(-1).topk(tree.top_k)
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            level += [(score + value, (*path, token)) for value, token in pairs]
        pool += level
        beam = sorted(level, reverse=True)[: tree.top_k]
    return {path for _, path in sorted(pool, key=lambda candidate: -candidate[0])[: tree.rows - 1]}


@torch.inference_mode()
@pytest.mark.parametrize("family", ["plain", "local", "native plain", "native local"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("num_tokens", [2, 13])
def test_drafts_see_what_the_window_says(
    family: str, window: Window | None, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the window ends among the draft's own rows."""
    monkeypatch.setattr(executor, "BLOCK_ROWS", 4)
    torch.manual_seed(2)
    decoder, tokens = decoder_of(family), random_tokens(num_tokens)
    tree = Tree(depth=5, top_k=2, rows=9)
    drafter = ModelDrafter(decoder, tree, CAPACITY).drafting(tree, window)
    drafter.observe(torch.zeros(num_tokens - 1, 1))
    drafted = drafter.draft(tokens, tree.depth)
    paths = {tuple(path) for path in drafted.paths()[1:]}
    assert paths == head_paths(decoder, tree, tokens, window)


@torch.inference_mode()
def test_a_heads_drafts_depend_on_what_it_sees() -> None:
    torch.manual_seed(3)
    decoder = decoder_of("plain")
    head, tokens = Weights(9).head(decoder), random_tokens(60)
    states = Verifier("it", decoder, cache_of(decoder)).read(tokens[:-1])
    tree = Tree(depth=3, top_k=2, rows=7)

    def scores(window: Window | None, text: list[int], states: Tensor) -> Tensor:
        drafter = EagleDrafter(head, tree, CAPACITY).drafting(tree, window)
        drafter.observe(states)
        return drafter.candidates(text, tree.depth).scores

    window = Window(tokens=8, sinks=2)
    narrow = scores(window, tokens, states)
    # rows that nothing sees: the middle
    states[20:30] = 0
    assert torch.equal(scores(window, tokens, states), narrow)
    assert not torch.equal(scores(None, tokens, states), scores(window, tokens, states))
    states[0] = 0
    assert not torch.equal(scores(window, tokens, states), narrow)


# Chains


def engine_of(share_caches: bool = True) -> Engine:
    config = small_config(num_layers=2, hidden_size=32)
    decoders = {
        "target": Weights(1).decoder(config),
        "intermediate": Weights(1, noise=0.3).decoder(config),
        "small": Weights(3).decoder(small_config(num_layers=1, hidden_size=16)),
    }
    drafters = {
        "draft": Weights(9).head(decoders["intermediate"]),
        "copy": Weights(1, noise=0.2).decoder(config),
    }
    drafts_for = dict.fromkeys(drafters, ("intermediate",))
    return Engine(Models(decoders, drafters, drafts_for, 64), share_caches)


FLUSH = {"target": Flush(length=3), "intermediate": Flush(length=2)}
SHAPE = Tree(depth=3, top_k=2, rows=6)
PROMPT = [3, 1, 4, 1, 5, 2, 0, 5, 3, 5, 0, 2]
PLANS = [
    Plan(members=("target", "intermediate", "draft"), tree=SHAPE, flush=FLUSH),
    Plan(members=("target", "intermediate", "copy"), tree=SHAPE, flush=FLUSH),
    Plan(members=("target", "intermediate", "small"), tree=SHAPE, flush=FLUSH),
    Plan(members=("target", "small"), tree=SHAPE, flush=FLUSH, ngram=Ngram(min_match=1)),
]


def answer(engine: Engine, plan: Plan, sampling: Sampling | None = None) -> tuple[list[int], Any]:
    request = Request(PROMPT, 40, sampling or Sampling(), (), plan)
    found = engine.run(request)
    return [token for batch in found for token in batch], found.statistics


def with_windows(plan: Plan, window: Window) -> Plan:
    return plan.model_copy(update={"windows": dict.fromkeys(plan.members[1:], window)})


@pytest.mark.parametrize(
    ("plan", "share_caches"),
    [(plan, place % 2 == 0) for place, plan in enumerate(PLANS)],
    ids=lambda value: "-".join(value.members) if isinstance(value, Plan) else str(value),
)
def test_greedy_answers_are_the_targets(plan: Plan, share_caches: bool) -> None:
    engine = engine_of(share_caches)
    alone, _ = answer(engine, Plan(members=("target",), tree=SHAPE))
    seen_all, all_statistics = answer(engine, plan)
    windowed, statistics = answer(engine, with_windows(plan, NARROW))
    assert alone == seen_all == windowed
    assert statistics.accepted_lengths != all_statistics.accepted_lengths, "the window did nothing"
    # and the windows of one request are gone with it
    again, again_statistics = answer(engine, plan)
    assert again == alone
    assert again_statistics.accepted_lengths == all_statistics.accepted_lengths


def test_a_window_on_the_target_would_change_answers() -> None:
    plan = PLANS[0].model_copy(update={"windows": {"target": NARROW}})
    engine = engine_of()
    alone, _ = answer(engine, Plan(members=("target",), tree=SHAPE))
    assert answer(engine, plan)[0] != alone


def test_own_caches_are_read_alike() -> None:
    shared, own = engine_of(), engine_of(share_caches=False)
    caches = [
        {name: id(verifier.cache) for name, verifier in engine.verifiers.items()}
        for engine in (shared, own)
    ]
    assert caches[0]["target"] == caches[0]["intermediate"] != caches[0]["small"]
    assert len(set(caches[1].values())) == 3
    assert answer(shared, PLANS[0])[0] == answer(own, PLANS[0])[0]


def test_chains_are_loaded_with_own_caches_and_beyond_what_is_declared(tiny_chain: Path) -> None:
    with pytest.raises(UserError, match="context out of range"):
        load_chain(tiny_chain, dtype="float32", context_tokens=5000)
    answers = []
    for share_caches in (True, False):
        chain = load_chain(
            tiny_chain,
            dtype="float32",
            context_tokens=5000,
            share_caches=share_caches,
            beyond_declared=True,
        )
        verifiers = chain.engine.verifiers
        assert chain.engine.context_tokens == 5000
        shares = verifiers["target"].cache is verifiers["intermediate"].cache
        assert shares == share_caches
        answers.append(chain.generate("w1 w2", max_new_tokens=20).token_ids)
    assert answers[0] == answers[1]
    with pytest.raises(UserError, match="context out of range"):
        load_chain(tiny_chain, dtype="float32", context_tokens=0, beyond_declared=True)


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ({"target": NARROW}, "target, whose distribution is kept"),
        ({"other": NARROW}, "other, which is no member"),
    ],
)
def test_windows_of_the_target_and_of_strangers_are_refused(
    tiny_chain: Path, windows: dict[str, Window], message: str
) -> None:
    members = read_manifest(tiny_chain).members
    check_plan(with_windows(PLANS[0], NARROW), members)
    with pytest.raises(ValueError, match=message):
        check_plan(PLANS[0].model_copy(update={"windows": windows}), members)
    for wrong in ({"tokens": 0}, {"tokens": 1, "sinks": -1}, {"sinks": 1}):
        with pytest.raises(ValueError, match="1 validation error for Window"):
            Window(**wrong)
