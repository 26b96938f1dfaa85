"""AutoJudge on the command line: tokens are judged, a judge is trained, written and run."""

import json
import re
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from polybasic.chain.formats.card import shown_rule
from polybasic.chain.formats.plan import Plan
from polybasic.deploy.bench.judging import questions, tuning
from polybasic.deploy.bench.judging.questions import CheckedQuestion
from polybasic.deploy.bench.judging.tuning import JudgeTuner, JudgeTuning, Point
from tests.recipes.command_line import call, refusal

SHORT = ["--max-new-tokens", "24", "--dtype", "float32"]
RULE = ["--rule", "autojudge", "--quality", "0.9"]
POINT = Point(0.25, 1.3, (7, 8), 9, 0.95, 0.5, (1.1, 1.5), (0.8, 1.0))


def made(num: int) -> list[CheckedQuestion]:
    """Answers come to one of two numbers by chance, which a judge cannot tell."""
    return [
        CheckedQuestion("numbers", f"w{number}", lambda text: crc32(text.encode()) % 2, 1)
        for number in range(1, num + 1)
    ]


def test_a_judge_is_trained_shown_written_and_run(
    tiny_chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def tune(self: JudgeTuner, thresholds: Any, quality: float, *given: Any) -> JudgeTuning:
        asked.append((thresholds, quality, *(len(part) for part in given[0])))
        return JudgeTuning(self.plan(0.25), self.lossless, POINT, (POINT,))

    monkeypatch.setattr(questions, "made_questions", made)
    monkeypatch.setattr(tuning.JudgeTuner, "tune", tune)
    out, before = tmp_path / "plans" / "judge.json", (tiny_chain / "chain.json").read_bytes()
    out.parent.mkdir()
    arguments = ["plan", tiny_chain, *RULE, "--out", out, *SHORT]
    arguments += ["--num-prompts-per-task", "100"]
    code, shown, told = call(*arguments)
    assert code == 0, told
    assert (tiny_chain / "chain.json").read_bytes() == before
    assert asked[0][1:] == (0.9, 25, 25)
    assert asked[0][0] == sorted(asked[0][0])
    line = " ".join(shown.split())
    assert "Lossy: 1.30x of the lossless plan (1.10-1.50); of 9 questions 7 are answered" in line
    assert "by the lossless plan 8; 95.0% of tokens the target's own" in line
    chance = re.search(r"(\d+)% of the time \(50% by chance\)", line)
    assert chance is not None
    assert (int(chance[1]) <= 50) == ("no better than chance" in line)
    assert "below the 90% of the lossless plan's score" in line
    assert f"wrote {out} and {out.with_suffix('.safetensors')}" in told
    judge = json.loads(call(*arguments, "--json")[1])["judge"]
    assert 10 <= judge["tokens_that_matter"] <= judge["tokens"] - 10
    assert json.loads(out.read_text())["lossy"] == {"file": "judge.safetensors", "threshold": 0.25}
    # both files may be moved together
    moved = tmp_path / "moved"
    out.parent.rename(moved)
    generate = ["generate", tiny_chain, "-p", "w5", *SHORT, "--plan", moved / "judge.json"]
    code, _, told = call(*generate)
    assert code == 0, told
    assert "not the target's own" in told.splitlines()[-1]
    plan = Plan.model_validate_json((moved / "judge.json").read_text())
    assert shown_rule(plan) == "lossy: keeps what matters with a probability under 0.25"
    (moved / "judge.safetensors").unlink()
    assert f"judge not found: {moved / 'judge.safetensors'}" in refusal(*generate)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--rule", "autojudge"], "--rule autojudge without --quality"),
        (RULE, "--rule autojudge without --out"),
        ([*RULE, "--out", "a", "--link", "20ms"], "of a lossless plan: --link"),
        ([*RULE, "--out", "a", "--temperature", "1"], "a lossy plan does not draw: temperature=1"),
        ([*RULE, "--out", "a", "--prompts", "none.jsonl"], "questions not found: none.jsonl"),
        (["--run-code"], "programs of another rule's answers: --run-code"),
    ],
)
def test_wrong_options_are_told(tiny_chain: Path, arguments: list[str], told: str) -> None:
    assert told in refusal("plan", tiny_chain, *arguments)


def test_few_questions_are_told(tiny_chain: Path, tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text('{"prompt": "w1", "answer": 1}\n' * 3)
    told = refusal(
        "plan", tiny_chain, *RULE, "--out", tmp_path / "a.json", "--prompts", path, *SHORT
    )
    assert "too few questions that fit the context: 3" in told
