"""What a plan over a link is made from, on a real chain, and that it runs."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from polybasic.deploy import Chain, load_chain
from polybasic.deploy.planner.measuring.measurements import PassCosts
from polybasic.deploy.planner.measuring.message_costs import message_seconds
from polybasic.deploy.planner.run import plan_loaded
from polybasic.deploy.planner.settings import PlanGrid, PlanSettings
from polybasic.deploy.runtime.load import measured_link
from polybasic.deploy.runtime.remote.link import Link
from polybasic.deploy.runtime.remote.sequence import HeldSequence
from tests.deploy.runtime.remote.far import Far, key_file

LINK = Link.of("2ms")


def test_what_the_far_side_does_beside_its_pass_is_timed(
    local: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = PassCosts((1,), (0.0,))
    usual = message_seconds(local, [5, 9, 2], nothing, LINK)
    assert 0 < usual < 1
    assert message_seconds(local, [5, 9, 2], PassCosts((1,), (1.0,)), LINK) == 0
    verify = HeldSequence.verify

    def slow(self: HeldSequence, *given: Any) -> Any:
        time.sleep(usual)
        return verify(self, *given)

    monkeypatch.setattr(HeldSequence, "verify", slow)
    assert message_seconds(local, [5, 9, 2], nothing, LINK) > 1.5 * usual


def test_a_link_is_measured_by_pings(far: Far) -> None:
    key = key_file(far.near_folder.parent)
    link = measured_link(far.near_folder, remote=far.where, key_file=key)
    assert 0 < link.round_trip_seconds < 1
    assert float(f"{link.round_trip_seconds:.2g}") == link.round_trip_seconds


def test_a_plan_over_a_link_is_made_and_runs(
    folder: Path, far: Far, local: Chain, tmp_path: Path
) -> None:
    questions = tmp_path / "questions.jsonl"
    asked = {"question_id": "1", "category": "qa", "turns": ["w1 w2 w3"]}
    questions.write_text(json.dumps(asked) + "\n")
    grid = PlanGrid(depths=(2,), top_ks=(2,), rows=(4,), flush_lengths=(4,), ngram_matches=(2,))
    settings = PlanSettings(
        prompts=str(questions), max_new_tokens=12, dtype="float32", grid=grid, link="20ms"
    )
    whole = load_chain(folder, digests=False, dtype="float32", share_caches=False)
    planning = plan_loaded(whole, settings, lambda line: None)
    planned, (measurements,) = planning.measured, planning.measurements
    assert (planned.link, planned.by_load) == ("20ms", ())
    assert (measurements.link, measurements.is_optimistic) == (Link.of("20ms"), True)
    assert measurements.shares_cache == {name: name for name in measurements.verifying}
    assert planning.choice.alone.seconds_per_token > 0.02
    for measured_plan in (planned, *planned.others):
        found = far.near(plan=measured_plan.plan).generate([5, 9], max_new_tokens=20)
        assert found.token_ids == local.generate([5, 9], max_new_tokens=20).token_ids
