"""A dry run reads the first rows, the chat template and this machine, and downloads nothing."""

import json
from pathlib import Path

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.recipes.estimates import known
from polybasic.recipes.estimates.known import known_lines, machine_line
from polybasic.recipes.pipeline.stages import stages_of
from polybasic.recipes.schema.loading import load_recipe
from tests.checkpoints import byte_level_tokenizer
from tests.recipes.published_configs import write_config

ASKED = {"from": "human", "value": "What is it?"}
ANSWERED = {"from": "gpt", "value": "An owl."}


def lines_of(folder: Path, rows: list[object], *overrides: str) -> list[str]:
    conversations = folder / "conversations of mine.jsonl"
    conversations.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = folder / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": "Hi"}))
    changes = [f"data.conversations={conversations}", f"bench.prompts={prompts}", *overrides]
    recipe = load_recipe("base", changes)
    return list(known_lines(recipe, stages_of(recipe)))


def test_first_rows_and_chat_template_are_read(tmp_path: Path) -> None:
    target = write_config(tmp_path, "Qwen/Qwen3-8B")
    rows = [{"conversations": [ASKED, ANSWERED]}, {"conversations": [ASKED]}]
    downloaded = lines_of(tmp_path, rows, f"target.model={target}")
    assert downloaded == [
        f"data.conversations: {tmp_path}/conversations of mine.jsonl, 1 of 2 rows usable, "
        "1 skipped: fewer than two turns",
        f"chat template: the target's own, tried when {target} is downloaded",
        "plan.prompts: auto, first turns of held-out conversations",
        f"bench.prompts: {tmp_path}/p.jsonl, 1 prompt (prompts)",
    ]
    (target / "model.safetensors").write_bytes(b"")
    byte_level_tokenizer().save_pretrained(target)
    template = lines_of(tmp_path, rows, f"target.model={target}")[1]
    assert template.startswith("chat template: the target's own, takes 1 of the first 1 conversat")
    (tmp_path / "mute.jinja").write_text("{{ 'mute' }}")
    with pytest.raises(UserError, match="chat template"):
        lines_of(
            tmp_path,
            rows,
            f"target.model={target}",
            f"target.chat_template={tmp_path / 'mute.jinja'}",
        )
    with pytest.raises(UserError, match="no usable conversation in 1 row: "):
        lines_of(tmp_path, rows[1:])


def test_all_rows_are_read_as_far_as_time_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = f"target.model={write_config(tmp_path, 'Qwen/Qwen3-8B')}"
    rows: list[object] = [{"conversations": [ASKED, ANSWERED]}] * 30
    rows.append({"conversations": [ASKED]})
    assert "30 of 31 rows usable, 1 skipped: " in lines_of(tmp_path, rows, target)[0]
    monkeypatch.setattr(known, "READ_SECONDS", -1.0)
    assert "1 of the first 1 row usable" in lines_of(tmp_path, rows, target)[0]


def test_this_processor_is_named() -> None:
    assert "this machine: " in machine_line()
    assert "CPU kernels: " in machine_line()
