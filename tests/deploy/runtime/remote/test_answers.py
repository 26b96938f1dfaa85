"""A target elsewhere gives the answers that it gives here, whatever runs below it."""

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.manifest import read_manifest, write_manifest
from polybasic.chain.formats.package import Part
from polybasic.chain.formats.plan import AdaptiveFlush, Flush, MeasuredPlan, Ngram, Plan, Tree
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.runtime.hardware import hardware_name
from polybasic.deploy.runtime.remote import sequence
from polybasic.deploy.runtime.remote.link import answer_bytes, verify_bytes
from polybasic.deploy.runtime.remote.messages import Answer, Verify, packed
from polybasic.deploy.runtime.remote.session import Session
from polybasic.deploy.runtime.rounds.noise import Noise
from tests.conftest import ChainParts, package_around
from tests.deploy.runtime.remote.far import Far, key_file, loaded_target, serving

PROMPTS = [[5, 9, 2, 40, 5, 9, 2, 40, 5, 9], list(range(3, 40))]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 3, "top_k": 40, "logit_bias": {11: 1.0}},
    {"temperature": 0.8, "seed": 2**63, "choice": 1, "min_tokens": 20},
]
TREE = Tree(depth=3, top_k=2, rows=6)
PLANS = {
    "target": Plan(members=("target",), tree=TREE),
    "ngram": Plan(members=("target",), tree=TREE, ngram=Ngram(min_match=1, num_tokens=4)),
    "all": Plan(
        members=("target", "intermediate", "draft"), tree=TREE, flush={"target": Flush(length=4)}
    ),
    "all and ngram": Plan(
        members=("target", "intermediate", "draft"),
        tree=TREE,
        flush={"target": Flush(length=6)},
        ngram=Ngram(min_match=2, num_tokens=4),
    ),
}


def answers(chain: Chain, plan: Plan | None, num: int = 24) -> list[list[int]]:
    return [
        chain.generate(prompt, max_new_tokens=num, plan=plan, **sampling).token_ids
        for prompt in PROMPTS
        for sampling in SAMPLINGS
    ]


@pytest.mark.parametrize("optimistic", [True, False])
def test_every_plan_answers_as_the_chain_here(
    far: Far, local: Chain, optimistic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as over a slow link: no verdict is there before the stages below have gone on
    monkeypatch.setattr(Session, "has_verdict", property(lambda self: False))
    most: list[int] = []
    send = Session.send

    def counted(self: Session, ids: list[int]) -> None:
        send(self, ids)
        most.append(len(self.sent))

    monkeypatch.setattr(Session, "send", counted)
    near = far.near(optimistic=optimistic)
    expected = answers(local, PLANS["target"])
    for plan in PLANS.values():
        assert answers(near, plan) == expected
    assert max(most) > 2 if optimistic else max(most) == 1
    assert "target" not in near.engine.models.decoders
    assert "intermediate" not in far.chain.engine.models.decoders


@pytest.mark.parametrize("optimistic", [True, False])
def test_blocks_end_where_too_little_of_them_is_likely_to_be_kept(
    far: Far, optimistic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "has_verdict", property(lambda self: False))
    near = far.near(optimistic=optimistic)

    def asked(share: float) -> tuple[list[int], int]:
        adaptive = AdaptiveFlush(break_even=0.5, acceptance=(share,) * 8)
        flush = {"target": Flush(length=20, adaptive=adaptive)}
        plan = PLANS["all"].model_copy(update={"flush": flush})
        found = near.generate(PROMPTS[0], max_new_tokens=40, plan=plan)
        return found.token_ids, found.statistics.forward_passes["target"]

    (tokens, many), (same, few) = asked(0.01), asked(1.0)
    assert tokens == same
    assert many > few


def test_the_end_of_an_answer_is_sent_while_another_block_is_under_way(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "has_verdict", property(lambda self: False))
    under_way: list[list[list[int]]] = []
    verdict = Session.verdict

    def noted(self: Session) -> Any:
        under_way.append([block.ids for block in self.sent])
        return verdict(self)

    monkeypatch.setattr(Session, "verdict", noted)
    near, plan = far.near(), PLANS["all"]
    near.generate(PROMPTS[0], max_new_tokens=12, plan=plan)
    whole, *_, end = under_way[0]
    assert len(end) <= plan.flush["target"].length < len(whole)
    drafted = [token for ids in under_way[0] for token in ids][1:]
    assert len(drafted) == 11 or drafted[-1] in near.stop_tokens


def test_an_answer_that_is_there_is_taken_at_once(far: Far, local: Chain) -> None:
    """With verdicts that come when they come."""
    near = far.near()
    assert near.plan.members == ("target", "intermediate", "draft")
    assert answers(near, None) == answers(local, None)


def test_noise_of_another_seed_far_away_gives_other_answers(
    far: Far, local: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(model: Any, sampling: Any) -> Noise:
        return Noise(model, replace(sampling, seed=sampling.seed + 1))

    monkeypatch.setattr(sequence, "Noise", other)
    found = answers(far.near(), None)
    same = [a == b for a, b in zip(found, answers(local, None), strict=True)]
    assert same == [True, True, False, False] * len(PROMPTS)


def test_a_model_of_its_own_drafts_for_a_target_elsewhere(
    tiny_chain_parts: ChainParts, tmp_path: Path
) -> None:
    folder, parts = tmp_path / "pair", tiny_chain_parts
    draft = Path(shutil.copytree(parts.target, tmp_path / "draft_model"))
    plan = Plan(members=("target", "draft"), tree=TREE)
    package_around(folder, parts.target, [Part("draft", "drafter", "decoder", draft)], plan, True)
    local = load_chain(folder, digests=False, dtype="float32")
    with serving(loaded_target(folder), folder) as far:
        near = far.near()
        assert near.plan.members == ("target", "draft")
        found = near.generate([5, 9], max_new_tokens=40, temperature=1.0, seed=4)
        expected = local.generate([5, 9], max_new_tokens=40, temperature=1.0, seed=4)
    assert found.token_ids == expected.token_ids
    assert found.statistics.mean_accepted_length > 2
    assert found.statistics.forward_passes.keys() == {"target", "draft"}


def test_n_grams_may_be_all_that_runs_near_a_target(
    tiny_chain_parts: ChainParts, tmp_path: Path
) -> None:
    folder = tmp_path / "alone"
    package_around(folder, tiny_chain_parts.target, [], PLANS["ngram"], True)
    local = load_chain(folder, digests=False, dtype="float32")
    with serving(loaded_target(folder), folder) as far:
        near = far.near()
        assert near.memory.members == {}
        assert answers(near, None) == answers(local, None)
        near.engine.models.remote.close()


def test_the_plan_is_that_of_the_link_most_like_this_one(
    far: Far, near_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(near_folder, tmp_path / "planned"))
    manifest, hardware = read_manifest(folder), hardware_name(torch.device("cpu"))
    plans = {
        link: PLANS["all"].model_copy(update={"flush": {"target": Flush(length=length)}})
        for link, length in (("80ms", 20), ("0.2ms", 3), ("5ms,1Gbit", 9))
    }
    made = MeasuredPlan(
        plan=PLANS["target"],
        seconds_per_token=1.0,
        hardware=hardware,
        dtype="float32",
        temperature=0.0,
    )
    of_links = [
        made.model_copy(update={"link": link, "plan": plan}) for link, plan in plans.items()
    ]
    given = {"key_file": key_file(tmp_path)}
    write_manifest(folder, manifest.model_copy(update={"plans": (made, *of_links)}))
    assert far.near(folder, **given).plan == plans["0.2ms"]
    other = of_links[1].model_copy(update={"hardware": "another machine"})
    write_manifest(folder, manifest.model_copy(update={"plans": (made, other)}))
    assert far.near(folder, **given).plan == manifest.plan


def test_log_probabilities_and_members_travel_along(far: Far, local: Chain) -> None:
    near = far.near()
    for plan in PLANS.values():
        found = near.generate([5, 9], max_new_tokens=20, plan=plan, logprobs=3)
        expected = local.generate([5, 9], max_new_tokens=20, plan=PLANS["target"], logprobs=3)
        assert len(found.members) == len(found.token_ids)
        for row, other in zip(found.logprobs, expected.logprobs, strict=True):
            assert row.token == other.token
            assert row.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in row.top] == [token for token, _ in other.top]


def test_several_near_sides_are_answered_at_a_time(
    far: Far, local: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    nears = [far.near() for _ in range(2)]
    found: dict[int, list[list[int]]] = {}
    threads = [
        threading.Thread(target=lambda at=at, near=near: found.update({at: answers(near, None)}))
        for at, near in enumerate(nears)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == answers(local, None)


def test_answers_of_one_near_side_share_its_link(far: Far, local: Chain) -> None:
    near = far.near()
    streams = [near.stream(prompt, max_new_tokens=30, temperature=0.0) for prompt in PROMPTS]
    found: list[list[int]] = [[] for _ in streams]
    for pieces in zip(*streams, strict=False):
        for tokens, piece in zip(found, pieces, strict=True):
            tokens += piece.token_ids
    expected = [local.generate(prompt, max_new_tokens=30, temperature=0.0) for prompt in PROMPTS]
    for tokens, answer in zip(found, expected, strict=True):
        assert tokens == answer.token_ids[: len(tokens)]
        assert len(tokens) > 5


def test_answers_to_blocks_that_were_dropped_are_known_on_any_connection(
    far: Far, local: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "has_verdict", property(lambda self: False))
    near = far.near()
    streams = [near.stream(prompt, max_new_tokens=40, temperature=0.0) for prompt in PROMPTS]
    for stream, num in zip(streams, (1, 4), strict=True):
        for _ in range(num):
            next(stream)
    for stream in streams:
        stream.close()
    # the first one's caches go on with the connection of the second
    for prompt in (PROMPTS[0], [8, 8], PROMPTS[1]):
        found = near.generate(prompt, max_new_tokens=30, temperature=0.0).token_ids
        assert found == local.generate(prompt, max_new_tokens=30, temperature=0.0).token_ids


def test_an_answer_that_is_given_up_leaves_its_place(
    folder: Path, near_folder: Path, local: Chain
) -> None:
    with serving(loaded_target(folder, sequences=1), near_folder) as far:
        near, other = far.near(), far.near()
        other.engine.models.remote.reconnect_seconds = 0.0  # a refusal is read at the first try
        stream = near.stream([5, 9], max_new_tokens=40)
        next(stream)
        with pytest.raises(UserError, match="too many answers"):
            other.generate([5, 9], max_new_tokens=5)
        stream.close()
        far.wait_until_free()
        found = other.generate([5, 9], max_new_tokens=5)
    assert found.token_ids == local.generate([5, 9], max_new_tokens=5).token_ids


def test_the_bytes_of_messages_are_those_that_are_planned_with() -> None:
    import numpy as np

    for num_tokens in (1, 17, 2048):
        asked = Verify(number=10**6, position=10**5)
        num_bytes = len(packed(asked, {"ids": np.zeros(num_tokens, np.int32)}))
        # with length, tag, TCP and IP
        assert verify_bytes(num_tokens) - 64 <= num_bytes + 4 + 16 + 52 <= verify_bytes(num_tokens)
    answer = Answer(number=10**6, num_kept=100, next_token=10**5)
    assert len(packed(answer, {})) + 4 + 16 + 52 <= answer_bytes()
