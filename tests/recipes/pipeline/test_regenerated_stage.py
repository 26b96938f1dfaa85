"""The stage in which the target answers again: through this runtime, through a server, resumed."""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from polybasic.chain.base.errors import UserError
from polybasic.deploy.runtime import slots
from polybasic.deploy.runtime.answering import LoneTarget
from polybasic.deploy.runtime.batching import ActiveSequence
from polybasic.deploy.runtime.rounds.warping import Sampling
from polybasic.recipes.pipeline.conversation_rows import encoded_rows
from polybasic.recipes.pipeline.regenerated_stage import (
    ANSWERS_NAME,
    SELF_PROMPTED_STAGE,
    _runtime,
    regenerated_stage,
)
from polybasic.recipes.pipeline.running import PipelineStage, Workspace, run_stages
from polybasic.recipes.pipeline.sources import answers_of as answers_of_run
from polybasic.recipes.schema.recipe import Recipe
from polybasic.train.answers import self_prompting
from polybasic.train.answers.self_prompting import QUESTIONS_NAME, read_questions
from polybasic.train.data.chat import encode_prompt
from polybasic.train.data.conversations import load_conversations, split_conversations
from tests.checkpoints import write_family
from tests.train.fake_endpoint import Fault, serve

Rows = list[dict[str, Any]]


class Whole(Workspace):
    """A workspace whose data and target are whole; the target is left where it is."""

    def identity(self, stage: str) -> dict[str, Any]:
        given = {"data": {"conversations": "c"}, "target": {"folder": self.recipe.target.model}}
        return given.get(stage) or super().identity(stage)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target in float32, whose answers are bytes that mostly make no characters."""
    folder = tmp_path_factory.mktemp("target")
    write_family(folder, "qwen2", dtype=torch.float32)
    return folder


def workspace_of(
    tmp_path: Path,
    target: Path,
    num: int = 3,
    num_processes: int = 1,
    self_prompted: int | None = None,
    **regenerate: Any,
) -> Whole:
    tmp_path.mkdir(exist_ok=True)
    rows = []
    for index in range(num):
        turns = []
        for question in (f"question {index}", f"and then {index}?"):
            turns.append({"from": "human", "value": question})
            turns.append({"from": "gpt", "value": "a ready-made answer"})
        rows.append(json.dumps({"id": f"id{index}", "conversations": turns}) + "\n")
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(rows), "utf-8")
    data = {
        "conversations": str(source),
        "num_heldout": 1,
        "max_tokens": 400,
        "self_prompted": self_prompted,
        "regenerate": {"max_new_tokens": 12, **regenerate},
    }
    content = {"name": "a", "target": {"model": str(target)}, "data": data}
    content["train"] = {"num_processes": num_processes, "batch_size": num_processes}
    return Whole(Recipe.model_validate(content), tmp_path / "out")


def whole(name: str) -> PipelineStage:
    """A stage with nothing to do."""
    return PipelineStage(name, (), lambda _: {}, lambda _, __: {}, lambda _, __: {})


def run(workspace: Workspace) -> list[str]:
    """Bring the stage to its whole state; returns what was said of it."""
    workspace.out.mkdir(exist_ok=True)
    said: list[str] = []
    stages = (
        whole("data"),
        whole("target"),
        SELF_PROMPTED_STAGE,
        regenerated_stage(workspace.recipe),
    )
    run_stages(stages, workspace, ["regenerated"], said.append)
    return [line for line in said if line.startswith("regenerated")]


def regenerated_inputs(workspace: Workspace) -> dict[str, Any]:
    return regenerated_stage(workspace.recipe).inputs(workspace)


def answers_in(workspace: Workspace) -> Rows:
    path = workspace.folder("regenerated") / "conversations.jsonl"
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def greedy(target: Path, token_ids: list[int], max_new_tokens: int) -> list[int]:
    """The same by transformers' own loop, as a reference."""
    model: Any = AutoModelForCausalLM.from_pretrained(target)
    ids = torch.tensor([token_ids])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return made[0, len(token_ids) :].tolist()


def answers_of(
    lone: LoneTarget, asked: list[tuple[list[int], int, Sampling]]
) -> list[ActiveSequence]:
    """Answers to (prompt, new tokens, sampling), made at the same time."""
    made = [lone.begin(*request) for request in asked]
    while not all(running.is_over for running in made):
        lone.step()
    return made


def tokens_of(running: ActiveSequence) -> list[int]:
    return [token for piece in running.take() for token in piece.token_ids]


@pytest.mark.parametrize("sequences", [1, 3])
def test_the_target_alone_answers_as_transformers_does(target: Path, sequences: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target)
    lone = LoneTarget(target, target, 400, sequences)
    assert lone.sequences == sequences
    prompts = [
        encode_prompt(tokenizer, [{"role": "user", "content": question}])
        for question in ("one two one two one two", "Hello", "and then 3?")
    ]
    num_passes = []
    for start in range(0, len(prompts), sequences):
        asked = prompts[start : start + sequences]
        made = answers_of(lone, [(prompt, 40, Sampling(temperature=0.0)) for prompt in asked])
        for prompt, running in zip(asked, made, strict=True):
            tokens = tokens_of(running)
            assert tokens == greedy(target, prompt, 40)
            is_whole = tokens[-1] == tokenizer.eos_token_id
            assert running.statistics.stopped_by == ("stop" if is_whole else "length")
            assert lone.text(tokens) == tokenizer.decode(tokens, skip_special_tokens=True)
            num_passes.append(running.statistics.forward_passes["target"])
            running.close()
    # a draft was right somewhere where an answer is alone; the prompt's pass gave the first token
    assert (min(num_passes) < 39) == (sequences == 1)


@pytest.mark.parametrize("sequences", [1, 3])
def test_draws_are_those_of_the_seed_however_many_are_made(target: Path, sequences: int) -> None:
    prompt = encode_prompt(
        AutoTokenizer.from_pretrained(target), [{"role": "user", "content": "Hello"}]
    )
    lone, sampled = LoneTarget(target, target, 400, sequences), []
    asked = [(prompt, 20, Sampling(temperature=1.0, seed=seed)) for seed in (1, 1, 2)]
    for start in range(0, len(asked), sequences):
        for running in answers_of(lone, asked[start : start + sequences]):
            sampled.append(tokens_of(running))
            running.close()
    assert sampled[0] == sampled[1] != sampled[2]
    alone = LoneTarget(target, target, 400)
    assert [tokens_of(running) for running in answers_of(alone, asked[:1])] == sampled[:1]


def test_answers_at_a_time_are_no_more_than_memory_has_caches_for(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = LoneTarget(target, target, 400)._engine.slots.first.num_bytes
    monkeypatch.setattr(slots, "available_bytes", lambda _: 5 * size)
    assert LoneTarget(target, target, 400, 16).sequences == 3


@pytest.mark.parametrize("graphs", [True, False])
def test_graphs_reach_the_target_and_change_no_answer(
    target: Path, tmp_path: Path, graphs: bool
) -> None:
    workspace = workspace_of(tmp_path, target, graphs=graphs)
    opened = _runtime(workspace)
    assert isinstance(opened, AbstractContextManager)
    with opened as answerer:
        assert answerer._target._engine.graphs.enabled is graphs
    as_default = workspace_of(tmp_path, target)
    assert regenerated_inputs(workspace) == regenerated_inputs(as_default)


def test_a_dtype_that_is_none_is_refused(target: Path, tmp_path: Path) -> None:
    config = json.loads((target / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "int8"}))
    with pytest.raises(UserError, match=r"unknown dtype: .*config.json dtype int8"):
        LoneTarget(tmp_path, target, 64)


def test_the_stage_answers_through_this_runtime(target: Path, tmp_path: Path) -> None:
    workspace = workspace_of(tmp_path, target)
    assert run(workspace)[0] == "regenerated: starting (no earlier result)"
    tokenizer = AutoTokenizer.from_pretrained(target)
    rows = answers_in(workspace)
    assert [row["id"] for row in rows] == ["id0", "id1", "id2"]
    messages: list[dict[str, str]] = []
    for turn in rows[1]["conversations"]:
        if turn["from"] == "human":
            messages.append({"role": "user", "content": turn["value"]})
            continue
        tokens = greedy(target, encode_prompt(tokenizer, messages), 12)
        expected = tokenizer.decode(tokens, skip_special_tokens=True)
        assert turn["value"] == expected.rstrip("\ufffd")
        messages.append({"role": "assistant", "content": turn["value"]})
    assert len(messages) == 4
    record = workspace.record("regenerated")
    assert record is not None
    assert record.summary["answered_by"]["through"] == "runtime"
    assert (record.summary["num_done"], record.summary["num_answers"]) == (3, 6)
    assert "up to date (made " in run(workspace)[0]


def test_the_target_writes_questions_answers_them_and_none_is_held_out(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_prompting, "MOST_TOKENS", 12)
    monkeypatch.setattr(self_prompting, "_is_cut", lambda *_: False)
    monkeypatch.setattr(self_prompting, "reason_against", lambda _: None)
    workspace = workspace_of(tmp_path, target, self_prompted=4)
    run(workspace)
    rows = answers_in(workspace)
    written = [row for row in rows if row.get("task") == "self-prompted"]
    assert [row["id"] for row in written] == [f"self-prompted-{number}" for number in range(4)]
    assert len(rows) == 3 + 4
    questions = read_questions(workspace.folder("self_prompted") / QUESTIONS_NAME)
    assert [row["conversations"][0]["value"] for row in written] == questions
    # held-out ones are those of the rest alone, as are the prompts of plan and report
    training, heldout = split_conversations(load_conversations(answers_of_run(workspace)), 3 - 1)
    assert set(heldout["task"]) == {None}
    assert training["task"].count("self-prompted") == 4
    more = workspace_of(tmp_path, target, self_prompted=6)
    assert run(more)[0] == "regenerated: starting (changed: self_prompted.questions)"
    assert answers_in(more)[: len(rows)] == rows
    alone = workspace_of(tmp_path, target)
    assert SELF_PROMPTED_STAGE.name not in regenerated_stage(alone.recipe).needs
    assert "self_prompted" not in regenerated_inputs(alone)


def test_copies_learn_from_the_answers(target: Path, tmp_path: Path) -> None:
    workspace = workspace_of(tmp_path, target, num=8)
    run(workspace)
    told = workspace.recipe.model_dump()
    told["data"]["regenerate"] = None
    given = Whole(Recipe.model_validate(told), workspace.out)
    tokenizer = AutoTokenizer.from_pretrained(target)
    again, ready_made = (encoded_rows(each) for each in (workspace, given))
    for answered, ready in zip(again, ready_made, strict=True):
        texts = [[tokenizer.decode(row) for row in rows] for rows in (answered, ready)]
        assert len(texts[0]) == len(texts[1]) > 0
        for text, other in zip(*texts, strict=True):
            assert text.splitlines()[:2] == other.splitlines()[:2]  # the same first question
            assert "ready-made" in other
            assert "ready-made" not in text


def test_a_run_goes_on_where_its_server_failed(target: Path, tmp_path: Path) -> None:
    with serve() as endpoint:
        settings = {"endpoint": endpoint.url, "num_parallel": 1, "num_retries": 0}
        workspace = workspace_of(tmp_path, target, num=6, **settings)
        endpoint.faults["and then 3?"] = [Fault(500)]
        with pytest.raises(UserError, match=r"1 of 6, the first: HTTP 500"):
            run(workspace)
        asked = len(endpoint.asked)
        assert asked == 8
        # another address of the same server, and more patience: the same answers
        moved = workspace_of(
            tmp_path, target, num=6, endpoint=endpoint.url + "/", num_parallel=2, num_retries=1
        )
        assert run(moved)[0] == "regenerated: continuing (interrupted earlier)"
        assert len(endpoint.asked) == asked + 5
        assert len(answers_in(moved)) == 6
        # fewer conversations are a new run of the stage, for which every answer is there
        data = moved.recipe.data.model_copy(update={"limit": 4})
        fewer = Whole(moved.recipe.model_copy(update={"data": data}), moved.out)
        assert run(fewer)[0] == "regenerated: starting (changed: data.limit)"
        assert len(answers_in(fewer)) == 4
        assert len(endpoint.asked) == asked + 5


@pytest.mark.parametrize(
    ("settings", "changes_answers"),
    [
        ({"num_parallel": 7, "num_retries": 1, "timeout_seconds": 5}, False),
        ({"endpoint": "http://elsewhere:1/v1"}, True),
        ({"model": "other"}, True),
        ({"max_new_tokens": 7}, True),
        ({"temperature": 0.5}, True),
    ],
)
def test_the_result_depends_on_what_decides_on_answers(
    target: Path, tmp_path: Path, settings: dict[str, Any], changes_answers: bool
) -> None:
    plain, changed = workspace_of(tmp_path, target), workspace_of(tmp_path, target, **settings)
    inputs = [regenerated_inputs(each) for each in (plain, changed)]
    assert (inputs[0] != inputs[1]) == changes_answers
    both = [workspace_of(tmp_path, target, endpoint=f"http://{host}/v1") for host in ("a", "b")]
    assert regenerated_inputs(both[0]) == regenerated_inputs(both[1])


@pytest.mark.proof
def test_processes_answer_as_one_does_also_after_a_kill(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def written(workspace: Workspace) -> list[bytes]:
        folder = workspace.folder("regenerated")
        return [(folder / name).read_bytes() for name in ("conversations.jsonl", "accounting.json")]

    alone = workspace_of(tmp_path / "alone", target, 8, temperature=0.8)
    run(alone)
    (journal,) = (alone.out / ANSWERS_NAME).glob("*.jsonl")
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) == 16
    # what two processes have left that were killed at some answer: half a line
    three = workspace_of(tmp_path / "three", target, 8, 3, temperature=0.8)
    left = three.out / ANSWERS_NAME
    left.mkdir(parents=True)
    (left / journal.name).write_bytes(b"".join(lines[:5]) + lines[5][:9])
    (left / f"{journal.stem}.1.jsonl").write_bytes(b"".join(lines[8:11]) + lines[11][:9])
    run(three)
    assert written(three) == written(alone)
    journals = sorted(left.glob("*.jsonl"))
    assert len(journals) == 3
    assert sorted(b"".join(path.read_bytes() for path in journals).splitlines(True)) == sorted(
        lines
    )
    manifest = json.loads((three.folder("regenerated") / "shards.json").read_bytes())
    assert [shard["num_answers"] for shard in manifest["shards"]] == [6, 6, 4]
    greedy = workspace_of(tmp_path / "greedy", target, 8)
    run(greedy)
    assert written(greedy)[0] != written(alone)[0], "answers are drawn"
