"""A chain that is divided over processes answers as on one device.

The followers are threads here; processes are in test_processes.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polybasic.chain.base.errors import LostProcessError, UserError
from polybasic.chain.formats.checkpoints.shard import Shard
from polybasic.chain.formats.plan import Window
from polybasic.chain.formats.verify import CheckedChain, check_chain
from polybasic.chain.kernels.rows import Rows, consecutive_rows, tree_rows
from polybasic.chain.model.loading import load_decoder
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.runtime.load import stated_memory
from polybasic.deploy.runtime.memory import Memory
from polybasic.deploy.runtime.options import LoadOptions
from polybasic.deploy.runtime.parallel import follower, leader, processes
from polybasic.deploy.runtime.parallel.leader import Leader
from polybasic.deploy.runtime.parallel.runner import received_rows, sent_rows
from tests.deploy.runtime.parallel.following import CONTEXT_TOKENS, followers, write_divisible_chain
from tests.deploy.runtime.test_memory import allocated_by

PROMPT = [5, 9, 2, 31, 17, 8, 11, 4]
NUM_TOKENS = 12
MEMBERS = [("target",), ("target", "draft"), ("target", "intermediate", "draft")]
SETTINGS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 7}]
TOLERANCES = {"target": 1e-5, "intermediate": 1e-2}
"""Of logits, beside the largest one; the kernels for 4 bits round activations to bytes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_divisible_chain(tmp_path_factory.mktemp("divisible"))


def load(folder: Path, count: int = 1, **options: Any) -> Chain:
    options = {"dtype": "float32", "context_tokens": CONTEXT_TOKENS, "digests": False} | options
    return load_chain(folder, tensor_parallel=count, **options)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Chain:
    return load(folder)


@pytest.fixture(scope="module")
def pair(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    """Divided by two, for three sequences."""
    with followers(2, tmp_path_factory.mktemp("pair")), load(folder, 2, sequences=3) as chain:
        yield chain


def answers(chain: Chain) -> list[list[int]]:
    return [
        chain.generate(PROMPT, members=members, max_new_tokens=NUM_TOKENS, **settings).token_ids
        for members in MEMBERS
        for settings in SETTINGS
    ]


def errors(chain: Chain, whole: Chain) -> dict[str, float]:
    """Largest difference of logits, by member and beside the largest logit."""
    found = {}
    for name in whole.engine.verifiers:
        expected = logits(whole, name)
        difference = (logits(chain, name) - expected).abs().max()
        found[name] = float(difference / expected.abs().max())
    return found


def logits(chain: Chain, name: str) -> Tensor:
    """After a prompt, after a block that follows some of its rows, and after a copy of them."""
    slots = chain.engine.slots
    while len(slots.made) < 2:
        slots.make()
    for slot in slots.made:
        slot.clear()
    first, second = (slot.verifiers[name] for slot in slots.made[:2])
    with torch.inference_mode():
        prompt = first.logits(first.read(PROMPT))
        first.cache.keep([0, 2, 5])
        following = first.logits(first.read([3, 1, 4]))
        second.cache.copy_from(first.cache, 3)
        copied = second.logits(second.read([3, 1, 2, 7]))
    first.cache.truncate(0)
    return torch.cat([prompt, following, copied])


def test_answers_are_those_of_one_device(pair: Chain, whole: Chain) -> None:
    assert answers(pair) == answers(whole)
    found = errors(pair, whole)
    assert all(found[name] < TOLERANCES[name] for name in found), found


@pytest.mark.proof
@pytest.mark.parametrize(("count", "kernels"), [(4, "native"), (2, "device")])
def test_other_parts_and_kernels(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, kernels: str
) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", kernels)
    whole = load(folder)
    with followers(count, tmp_path), load(folder, count) as chain:
        expected = whole.generate(PROMPT, max_new_tokens=8).token_ids
        assert chain.generate(PROMPT, max_new_tokens=8).token_ids == expected
        found = errors(chain, whole)
        assert found["target"] < TOLERANCES["target"]
        if kernels == "device":  # the path of a GPU, where short passes are captured
            assert found["intermediate"] < TOLERANCES["target"]
            caches = [verifier.cache for verifier in chain.engine.verifiers.values()]
            captured = {name for cache in caches for name in cache.passes}  # type: ignore[attr-defined]
            assert captured == {"target", "intermediate"}


def test_several_answers_at_a_time(pair: Chain, whole: Chain) -> None:
    prompts = [PROMPT, [3, 1], PROMPT[:6]]
    expected = [whole.generate(prompt, max_new_tokens=NUM_TOKENS).token_ids for prompt in prompts]
    streams = [pair.begin(prompt, max_new_tokens=NUM_TOKENS) for prompt in prompts]
    while pair.step():
        pass
    assert [
        [id for piece in stream.take() for id in piece.token_ids] for stream in streams
    ] == expected


def test_states_hold_what_a_head_reads_of_layers(pair: Chain, whole: Chain) -> None:
    def states(chain: Chain) -> Tensor:
        model, capacity = chain.engine.models.target, len(PROMPT)
        cache = chain.engine.models.cache_of(model, capacity)
        with torch.inference_mode():
            ids, rows = torch.tensor(PROMPT), [consecutive_rows(0, capacity)]
            return model.forward(ids, [cache.layers], rows, feature_layers=(0, 1))

    expected = states(whole)
    atol = 1e-5 * expected.abs().max().item()
    torch.testing.assert_close(states(pair), expected, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "rows",
    [
        consecutive_rows(7, 3),
        consecutive_rows(0, 40, Window(tokens=5, sinks=2)),
        tree_rows(9, [-1, 0, 0, 2, 1], Window(tokens=3)),
    ],
)
def test_rows_arrive_as_they_were(rows: Rows) -> None:
    assert received_rows(json.loads(json.dumps(sent_rows(rows)))) == rows


@pytest.mark.parametrize("forgotten", ["move_rows", "copy_rows"])
def test_what_the_others_are_not_told_is_noticed(
    pair: Chain, whole: Chain, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    tell = Leader.tell

    def forget(self: Leader, name: str, *given: object) -> None:
        if name != forgotten:
            tell(self, name, *given)

    with monkeypatch.context() as patched:
        patched.setattr(Leader, "tell", forget)
        assert errors(pair, whole)["target"] > 0.01
    assert errors(pair, whole)["target"] < TOLERANCES["target"]


def test_chains_are_loaded_one_after_the_other(
    folder: Path, whole: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise UserError("damaged weight file", "model.safetensors", "fetch it again")

    expected = whole.generate(PROMPT, max_new_tokens=4).token_ids
    with followers(2, tmp_path):
        with monkeypatch.context() as patched:
            patched.setattr(follower, "load_parts", refuse)
            with pytest.raises(UserError) as error:
                load(folder, 2)
        said = "damaged weight file: model.safetensors (rank 1 of 2); fetch it again"
        assert str(error.value) == said
        with load(folder, 2) as chain:
            assert chain.generate(PROMPT, max_new_tokens=4).token_ids == expected
        with pytest.raises(UserError, match="chain was closed"):
            chain.generate(PROMPT, max_new_tokens=4)


def test_a_pass_that_is_broken_off_ends_the_others(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with followers(2, tmp_path, code=1), load(folder, 2) as chain:
        leading = chain.engine.models.leader
        assert leading is not None
        with monkeypatch.context() as patched:
            patched.setattr(leading.runner, "forward", interrupt)
            with pytest.raises(KeyboardInterrupt):
                chain.generate(PROMPT, max_new_tokens=4)
        with pytest.raises(LostProcessError, match="was interrupted"):
            chain.generate(PROMPT, max_new_tokens=4)


def test_bad_numbers_of_processes_are_refused_before_any_is_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "gathered", None)
    with pytest.raises(UserError, match=r"3 processes, 4 key/value heads of target; use 1, 2 or 4"):
        load(folder, 3)
    with pytest.raises(UserError, match="a number of processes"):
        load(folder, 0)


def test_orders_of_any_length_arrive(tmp_path: Path) -> None:
    with followers(2, tmp_path):
        group = processes._launched
        assert group is not None
        for number in (1, 300, 3000):
            group.send([["unload"]] * number)


def test_memory_is_stated_by_process(pair: Chain, whole: Chain) -> None:
    memory, other = pair.memory, pair.memory.follower
    assert other is not None
    assert "draft" not in other.members
    assert 2 * pair.engine.slots.first.num_bytes == whole.engine.slots.first.num_bytes
    for name in ("target", "intermediate"):
        parts = memory.members[name]["weights"], other.members[name]["weights"]
        # embedding and norms are in both
        assert max(parts) < whole.memory.members[name]["weights"] < sum(parts)
    needed = memory.needed_bytes
    assert needed == memory.peak_bytes + other.peak_bytes
    memory.check_fits(needed)
    with pytest.raises(UserError, match="by 2 processes"):
        memory.check_fits(needed - 1)
    assert "in the other" in memory.shown


@pytest.mark.parametrize("rank", [0, 1])
def test_stated_weights_of_a_part_are_those_that_are_loaded(folder: Path, rank: int) -> None:
    checked, count = check_chain(folder, digests=False), 2
    stated = load_stated(checked, count)
    weights = (stated if rank == 0 else stated.follower).members["target"]["weights"]  # type: ignore[union-attr]
    file = checked.configs["target"]
    given = file, torch.float32, torch.device("cpu"), 1, Shard(rank, count), torch.clone
    _, stays, _ = allocated_by(lambda: load_decoder(*given))
    assert stays == pytest.approx(weights, rel=0.05)


def load_stated(checked: CheckedChain, count: int) -> Memory:
    options = LoadOptions(dtype="float32", context_tokens=1, tensor_parallel=count)
    return stated_memory(checked, options)[0]
