"""The table of heads: its lines, their commands, and a small one from training to record."""

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import read_json
from polybasic.recipes.schema.loading import load_recipe
from tests.benchmarks.scripts import load_script
from tests.checkpoints import write_family
from tests.conftest import write_intermediate
from tests.train.counting import write_counting

heads = load_script("heads")

LINES = ["token_loss=forward_kl,features_from=intermediate,unroll_steps=3", "draft_vocab_size=64"]
SETTINGS = (
    "data.num_heldout=4 data.max_tokens=96 train.num_steps=2 train.warmup_steps=1 "
    "train.batch_size=2 train.eval_every_steps=2 train.eval_answer_tokens=6 train.dtype=float32"
)


def arguments_of(monkeypatch: pytest.MonkeyPatch, words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["heads.py", *shlex.split(words)])
    return heads.parsed()


def test_lines_are_all_combinations_and_those_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = arguments_of(monkeypatch, "T I C --work W")
    lines = heads.grid(whole)
    assert len(lines) == 4 * 2 * 3 + len(heads.ALSO)
    assert lines[0] == "token_loss=cross_entropy,features_from=target,unroll_steps=1"
    assert lines[-4] == "kind=eagle3,feature_loss_weight=0"
    narrow = "T I C --work W --objectives forward_kl --features-from target --unroll-steps 2"
    assert heads.grid(arguments_of(monkeypatch, narrow + " --also")) == [
        "token_loss=forward_kl,feature_loss_weight=0,features_from=target,unroll_steps=2"
    ]


@pytest.mark.proof
def test_small_table_from_training_to_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, intermediate = tmp_path / "target", tmp_path / "intermediate"
    write_family(target, "llama3", dtype=torch.float32, num_shards=1)
    write_intermediate(intermediate, target)
    data = write_counting(tmp_path / "counting.jsonl", "Count on from {}.", 4, 5)
    record = tmp_path / "record.json"
    places = f"{target} {intermediate} {data} --work {tmp_path / 'work'}"
    words = f"{places} --only {' '.join(LINES)} --offline-features --set {SETTINGS}"

    def run(words: str) -> list[dict[str, Any]]:
        arguments_of(monkeypatch, words)
        heads.main()
        kept = (tmp_path / "work" / line / "result.json" for line in LINES)
        return [read_json(path, "result")["result"] for path in kept]

    found = run(f"{words} --record {record}")
    assert str(tmp_path) not in record.read_text()
    assert [result["line"] for result in found] == LINES
    settings = [
        read_json(tmp_path / "work" / line / "head" / "training.json", "record")["settings"]
        for line in LINES
    ]
    assert [options["features_from"] for options in settings] == ["intermediate", "target"]
    of_recipe = load_recipe("smollm2-135m").train.unroll_steps
    assert [options["unroll_steps"] for options in settings] == [3, of_recipe] != [3, 3]
    assert [Path(options["features_folder"]).name for options in settings] == [
        "intermediate-eagle2",
        "target-eagle2",
    ]
    assert settings[0]["eval_tree_depth"] == settings[1]["eval_tree_depth"] == 8
    for result in found:
        judged = result["verified_by"]
        assert judged["target"]["num_rounds"] > 0
        # each was evaluated in training by the model that it learned from
        verifier = "intermediate" if result["line"] == LINES[0] else "target"
        assert judged[verifier]["accepted_length"] == pytest.approx(
            result["training"]["simulated_accepted_length"], abs=1e-4
        )
        assert judged[verifier]["by_task"] == pytest.approx(
            result["training"]["accepted_by_task"], abs=1e-4
        )
    assert "untrimmed_accepted_length" in found[1]["training"]
    shown = capsys.readouterr().out
    for judge in heads.JUDGES:
        lengths = [result["verified_by"][judge]["accepted_length"] for result in found]
        assert all(f"{length:.2f}" in shown for length in lengths)

    def refuse(*_: Any, **__: Any) -> None:
        raise UserError("trained again", "a line", "not to be")

    monkeypatch.setattr(heads, "in_processes", refuse)
    assert run(f"{words} --record {record}") == found, "kept in the work folder"
    with pytest.raises(UserError, match="trained again"):
        run(f"{words.replace('num_steps=2', 'num_steps=3')} --record {record}")
    with pytest.raises(UserError, match="unroll"):
        run(f"{places} --only unroll_stepz=2 --record {record}")
