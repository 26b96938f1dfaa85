"""Where a draft head comes from: which parts do the work, and on what the result depends."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processes.interruption import Interrupted
from polybasic.chain.formats.files import write_json
from polybasic.recipes.pipeline.running import PipelineStage, Workspace, run_stages
from polybasic.recipes.pipeline.stages import stages_of
from polybasic.recipes.schema.recipe import Recipe
from polybasic.train.settings import LoraSettings
from tests.recipes.published_configs import write_config

Calls = list[tuple[str, dict[str, Any]]]


class Whole(Workspace):
    """A workspace in which every stage is whole."""

    def identity(self, stage: str) -> dict[str, Any]:
        files = {"tokenizer.json": [1, 0], "model.safetensors": [1, 2]}
        folder = {"folder": f"/models/{stage}", "files": files}
        return {"data": {"conversations": "c", "prompts": "p"}}.get(stage, folder)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What the stages ask of those who train and import, in order."""
    found: Calls = []

    def train(_: Any, arguments: dict[str, Any], num_processes: int) -> dict[str, Any]:
        found.append(("train", {"num_processes": num_processes, **arguments}))
        return {"simulated_accepted_length": 3.0}

    def take(source: Path, target: Path, out: Path) -> dict[str, Any]:
        found.append(("import", {"source": source, "target": target, "out": out}))
        out.mkdir(exist_ok=True)
        return {"imported_from": str(source)}

    monkeypatch.setattr("polybasic.chain.base.processes.launching.in_processes", train)
    monkeypatch.setattr("polybasic.chain.heads.importing.import_head", take)
    return found


@pytest.fixture
def head(tmp_path: Path) -> Path:
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"1")
    return folder


def workspace_of(tmp_path: Path, **sections: Any) -> Whole:
    content = {"name": "a", "target": {"model": "org/name"}, **sections}
    return Whole(Recipe.model_validate(content), tmp_path / "out")


def stage_of(workspace: Workspace, name: str) -> PipelineStage:
    return next(stage for stage in stages_of(workspace.recipe) if stage.name == name)


def run(workspace: Workspace, folder: Path, name: str = "draft") -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    stage = stage_of(workspace, name)
    write_json(folder / "started.json", stage.inputs(workspace))
    return stage.run(workspace, folder)


def test_a_head_is_trained_in_the_processes_of_the_recipe(calls: Calls, tmp_path: Path) -> None:
    train = {"num_processes": 4, "batch_size": 8}
    workspace = workspace_of(tmp_path, train=train)
    folder = tmp_path / "draft"
    assert run(workspace, folder) == {"simulated_accepted_length": 3.0}
    [(what, arguments)] = calls
    assert what == "train"
    assert arguments["num_processes"] == 4
    assert arguments["target"] == arguments["tokenizer"] == Path("/models/target")
    assert arguments["out"] == folder
    assert not {"start", "lora"} & set(arguments)


def test_a_checkpoint_outlives_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: Any, arguments: dict[str, Any], num_processes: int) -> None:
        out = arguments["out"]
        if not (out / "checkpoints").exists():
            (out / "checkpoints" / "step-00000010").mkdir(parents=True)
        raise Interrupted(signal.SIGTERM, "saved", is_saved=True)

    monkeypatch.setattr("polybasic.chain.base.processes.launching.in_processes", interrupted)
    first, slower, shared = (
        workspace_of(tmp_path, train={"batch_size": 4, **train})
        for train in ({}, {"learning_rate": 1e-5}, {"num_processes": 2})
    )
    draft = replace(stage_of(first, "draft"), needs=())
    with pytest.raises(Interrupted):
        run_stages([draft], first, None, print)
    with pytest.raises(UserError, match=r"\(train.learning_rate was 3e-05, now 1e-05\)"):
        run_stages([draft], slower, None, print)
    with pytest.raises(Interrupted):
        run_stages([draft], shared, None, print)
    assert (tmp_path / "out" / ".draft.partial" / "checkpoints" / "step-00000010").is_dir()


def test_a_head_learns_the_copy_that_verifies(calls: Calls, tmp_path: Path) -> None:
    learned = {"train": {"features_from": "intermediate"}, "small": {"model": "org/small"}}
    workspace = workspace_of(tmp_path, **learned)
    names = [stage.name for stage in stages_of(workspace.recipe)]
    for name, copy in (("draft", "intermediate"), ("small_draft", "small")):
        assert copy in stage_of(workspace, name).needs
        assert copy in stage_of(workspace, name).inputs(workspace)
        assert names.index(copy) < names.index(name)
        run(workspace, tmp_path / name, name)
        assert calls.pop()[1]["intermediate"] == workspace.folder(copy)
    plain = workspace_of(tmp_path, small={"model": "org/small"})
    assert "intermediate" not in stage_of(plain, "draft").needs
    run(plain, tmp_path / "plain")
    assert "intermediate" not in calls.pop()[1]


def test_what_was_asked_for_lies_beside_a_head(calls: Calls, tmp_path: Path) -> None:
    workspace = replace(workspace_of(tmp_path), command="polybasic train a")
    run(workspace, tmp_path / "draft")
    [(_, arguments)] = calls
    provenance = arguments["provenance"]
    assert provenance["command"] == "polybasic train a"
    assert provenance["recipe"]["target"]["model"] == "org/name"
    assert "torch" in provenance["package_versions"]


def test_offline_features_outlive_the_stage(calls: Calls, tmp_path: Path) -> None:
    def folder(**train: Any) -> str | None:
        workspace = workspace_of(tmp_path, train=train)
        run(workspace, tmp_path / "draft")
        found: str | None = calls.pop()[1]["settings"].features_folder
        return found

    assert folder() is None
    assert folder(features="offline") == str(tmp_path / "out" / "features" / "target")
    assert folder(features="offline", features_folder="mine") == "mine"


def test_a_ready_head_is_taken_as_it_is(calls: Calls, head: Path, tmp_path: Path) -> None:
    workspace = workspace_of(tmp_path, draft={"model": str(head)})
    folder = tmp_path / "draft"
    assert run(workspace, folder) == {"imported_from": str(head)}
    assert calls == [("import", {"source": head, "target": Path("/models/target"), "out": folder})]


@pytest.mark.parametrize(("adapt", "lora"), [("lora", LoraSettings(rank=2)), ("full", None)])
def test_a_ready_head_is_adapted(
    calls: Calls, head: Path, tmp_path: Path, adapt: str, lora: LoraSettings | None
) -> None:
    draft = {"model": str(head), "adapt": adapt, "lora": {"rank": 2}}
    workspace = workspace_of(tmp_path, draft=draft)
    folder = tmp_path / "draft"
    summary = run(workspace, folder)
    assert summary == {"imported_from": str(head), "simulated_accepted_length": 3.0}
    (first, imported), (second, trained) = calls
    assert (first, second) == ("import", "train")
    assert imported["out"] == trained["start"] != folder
    assert trained["out"] == folder
    assert trained["lora"] == lora
    assert not imported["out"].exists()


def test_a_smaller_models_head_is_trained(calls: Calls, head: Path, tmp_path: Path) -> None:
    small = {"model": "org/small"}
    workspace = workspace_of(tmp_path, small=small, draft={"model": str(head)})
    run(workspace, tmp_path / "small_draft", "small_draft")
    [(what, arguments)] = calls
    assert what == "train"
    assert arguments["target"] == Path("/models/small_target")
    # one vocabulary, one tokenizer: the target's
    assert arguments["tokenizer"] == Path("/models/target")


def test_inputs_are_what_the_result_depends_on(head: Path, tmp_path: Path) -> None:
    def inputs(name: str = "draft", **sections: Any) -> dict[str, Any]:
        sections = {"small": {"model": "org/small"}, **sections}
        workspace = workspace_of(tmp_path, **sections)
        return stage_of(workspace, name).inputs(workspace)

    longer = {"num_steps": 900_000}
    ready, adapted = {"model": str(head)}, {"model": str(head), "adapt": "lora"}
    assert inputs() != inputs(train=longer)
    elsewhere = {"features": "offline", "features_folder": "elsewhere"}
    assert inputs(train={"features": "offline"}) == inputs(train=elsewhere)
    for changed in ({"num_processes": 2}, {"log": "wandb"}, {"save_every_steps": 7}):
        assert inputs() == inputs(train=changed), "the head is not trained again"
    assert inputs() != inputs(draft=ready)
    assert inputs(draft=ready) == inputs(draft=ready, train=longer)
    assert inputs(draft=ready) != inputs(draft=adapted)
    assert inputs(draft=adapted) != inputs(draft=adapted, train=longer)
    assert inputs(draft=adapted) != inputs(draft=adapted | {"lora": {"rank": 2}})
    # a smaller model's head has nothing to do with the target's
    assert inputs("small_draft") == inputs("small_draft", draft=adapted)
    before = inputs(draft=ready)
    (head / "pytorch_model.bin").write_bytes(b"12")
    assert inputs(draft=ready) != before


def test_a_smaller_models_stages_depend_on_the_chains_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_config(tmp_path, "Qwen/Qwen3-8B")
    module = "polybasic.recipes.pipeline.model_stages"
    monkeypatch.setattr(f"{module}.checkpoint_of", lambda workspace, stage: folder)
    workspace = workspace_of(tmp_path, small={"model": "org/small"})

    class Retokenized(Whole):
        def identity(self, stage: str) -> dict[str, Any]:
            prepared = {"tokenizer": {"tokenizer.json": "other"}} if stage == "target" else {}
            return super().identity(stage) | prepared

    other = Retokenized(workspace.recipe, workspace.out)
    for name in ("small", "small_draft"):
        stage = stage_of(workspace, name)
        assert stage.inputs(other) != stage.inputs(workspace)
