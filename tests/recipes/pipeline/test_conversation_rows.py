"""Token ids that 4-bit copies are made from: fitted to the template, and not more than needed."""

import json
from pathlib import Path
from typing import Any

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.recipes.pipeline import conversation_rows
from polybasic.recipes.pipeline.conversation_rows import encoded_rows
from polybasic.recipes.pipeline.running import Workspace
from polybasic.recipes.schema.recipe import Recipe
from tests.checkpoints import CHATML, write_family

REFUSING = (
    "{% for message in messages %}{% if 'secret' in message.content %}"
    "{{ raise_exception('not that') }}{% endif %}{% endfor %}" + CHATML
)


class Whole(Workspace):
    """A workspace whose target stage is whole and left the target where it is."""

    def identity(self, stage: str) -> dict[str, Any]:
        return {"folder": self.recipe.target.model}


def workspace_of(tmp_path: Path, num_secrets: int) -> Whole:
    target, source = tmp_path / "target", tmp_path / "rows.jsonl"
    write_family(target, "qwen2")
    (target / "chat_template.jinja").write_text(REFUSING)
    rows = []
    for index in range(30):
        answer = "a secret" if index < num_secrets else f"answer {index}"
        turns = [{"from": "human", "value": f"{index}?"}, {"from": "gpt", "value": answer}]
        rows.append(json.dumps({"conversations": turns}) + "\n")
    source.write_text("".join(rows), "utf-8")
    recipe = Recipe.model_validate(
        {
            "name": "a",
            "target": {"model": str(target)},
            "data": {"conversations": str(source), "num_heldout": 5},
        }
    )
    return Whole(recipe, tmp_path / "out")


def test_conversations_that_a_template_refuses_are_left_out_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    training, heldout = encoded_rows(workspace_of(tmp_path, 4))
    assert len(training) + len(heldout) == 26
    assert all(row for row in training + heldout)
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("left out")]
    assert sum(int(line.split()[2]) for line in told) == 4
    assert "not that" in told[0]


def test_a_template_that_refuses_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rejects the messages: .*not that"):
        encoded_rows(workspace_of(tmp_path, 30))


def test_no_more_are_encoded_than_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = workspace_of(tmp_path, 0)
    everything, heldout = encoded_rows(workspace)
    monkeypatch.setattr(conversation_rows, "_MOST_ENCODED", 7)
    some, same = encoded_rows(workspace)
    assert (len(everything), len(some)) == (25, 7)
    assert all(row in everything for row in some)
    assert same == heldout
