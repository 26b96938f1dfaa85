"""How well a target that was trained here answers: from the manifest into the report."""

from types import SimpleNamespace
from typing import Any

from polybasic.deploy.bench.members import answers_of_target
from polybasic.deploy.bench.report.lines import answers_line

RECORD = {
    "loss": 0.6,
    "heldout_loss": 0.7176,
    "heldout_answer_loss": 0.547,
    "right_tokens": 0.8469,
    "right_tokens_by_task": {"qa": 0.8878, "rag": 0.857},
    "right_answers": 0.125,
    "right_answers_by_task": {"qa": 0.25, "rag": 0.0},
    "num_answers": 80,
}


def of_manifest(**training: Any) -> dict[str, Any] | None:
    manifest: Any = SimpleNamespace(members=[SimpleNamespace(name="target")], training=training)
    return answers_of_target(manifest)


def test_a_line_says_what_the_manifest_records() -> None:
    found = of_manifest(target=RECORD, draft={"loss": 1.0})
    assert found == {name: value for name, value in RECORD.items() if name != "loss"}
    assert answers_line(found) == (
        "target on held-out conversations: 0.718 nats a token, 0.547 in answers; right are 84.7% "
        "of the answers' tokens and 12.5% of 80 whole answers (qa 89% and 25%, rag 86% and 0%)"
    )


def test_of_other_targets_there_is_no_line() -> None:
    assert of_manifest(draft={"loss": 1.0}) is None
    assert of_manifest(target={"loss": 0.6}) is None  # nothing was held out
    assert answers_line(None) == ""
