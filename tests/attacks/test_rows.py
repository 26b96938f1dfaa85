"""Rows of conversations and prompts that hold what they should not, and nonsensical commands."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polybasic.deploy.planner.prompts import read_questions
from polybasic.train.data.conversations import load_conversations
from tests.attacks import outcomes
from tests.attacks.test_chains import OTHERS, changed
from tests.attacks.test_files import accept

CONVERSATION = {
    "id": "one",
    "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
}
PROMPT = {"question_id": 1, "category": "qa", "turns": ["Why?"]}
COMMANDS: list[list[Any]] = [
    ["generate", "CHAIN", "-p", "w1", "--max-new-tokens", "nan"],
    ["generate", "CHAIN", "-p", "w1", "--max-new-tokens", "-1"],
    ["generate", "CHAIN", "-p", "w1", "--temperature", "nan"],
    ["generate", "CHAIN", "-p", "w1", "--top-p", "1e-46"],
    ["generate", "CHAIN", "-p", "w1", "--logit-bias", "x=1"],
    ["generate", "CHAIN", "-p", "w1", "--logit-bias", "1=nan"],
    ["generate", "CHAIN", "-p", "w1", "--seed", "1" + "0" * 5000],
    ["generate", "CHAIN", "-p", "w1", "--rule", "other"],
    ["generate", "CHAIN", "-p", "w1", "--members", ",,"],
    ["generate", "CHAIN", "-p", "w1", "--context-tokens", "100000000000"],
    ["generate", "CHAIN", "-p", "w1", "--dtype", "\x1b[2J"],
    ["generate", "CHAIN", "-p", "\udcff"],
    ["generate", "x" * 5000, "-p", "w1"],
    ["generate", "\x1b[2J", "-p", "w1"],
    ["inspect", "CHAIN/chain.json"],
    ["verify", "CHAIN/draft/model.safetensors"],
    ["plan", "CHAIN", "--temperature", "inf"],
    ["plan", "CHAIN", "--max-new-tokens", "1e9"],
    ["plan", "CHAIN", "--prompts", "/dev/null"],
    ["plan", "CHAIN", "--prompts", "file:///etc/passwd"],
    ["bench", "CHAIN", "--seed", "-1"],
    ["bench", "CHAIN", "--systems", ",\x1b[2J"],
    ["export", "CHAIN", "--to", "elsewhere"],
    ["recipes", "show", "../" * 50],
    ["recipes", "cp", "\0"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: ascii(command)[:60])
def test_commands_are_refused(tiny_chain: Path, command: list[str]) -> None:
    words = [word.replace("CHAIN", str(tiny_chain), 1) for word in command]
    assert outcomes.of_command(*words)


@pytest.mark.parametrize(
    ("row", "read"),
    [(CONVERSATION, lambda path: load_conversations(str(path))), (PROMPT, read_questions)],
    ids=["conversation", "prompt"],
)
def test_whatever_a_row_says_is_read_or_refused(
    tmp_path: Path, row: dict[str, Any], read: Callable[[Path], Any]
) -> None:
    path, refused = tmp_path / "rows.jsonl", 0
    for other in [*OTHERS, *(other for _, other in changed(row))]:
        path.write_text(f"{json.dumps(row)}\n{json.dumps(other)}\n")
        try:
            refused += outcomes.of_call(lambda: read(path)) is not None
        except Exception as error:
            raise AssertionError(str(other)) from error
    path.write_text(json.dumps(row))
    assert outcomes.of_call(lambda: read(path)) is None


class Opens:
    """What a pickle of it does where it is trusted."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("written", ["torch", "pickle"])
def test_a_pickled_target_runs_nothing(tiny_chain: Path, tmp_path: Path, written: str) -> None:
    target, opened = tiny_chain / "target", tmp_path / "opened"
    (target / "model.safetensors").unlink()
    if written == "torch":
        torch.save({"lm_head.weight": Opens(opened)}, target / "pytorch_model.bin")
    else:
        (target / "pytorch_model.bin").write_bytes(pickle.dumps(Opens(opened)))
    path = tiny_chain / "chain.json"
    manifest = json.loads(path.read_text())
    digests = manifest["members"][0]["files"]
    digests["pytorch_model.bin"] = digests.pop("model.safetensors")
    path.write_text(json.dumps(manifest))
    accept(tiny_chain)
    assert outcomes.of_command("generate", tiny_chain, "-p", "w1")
    assert not opened.exists()
    pickle.loads(pickle.dumps(Opens(opened)))  # the attack works where pickles are trusted
    assert opened.exists()
