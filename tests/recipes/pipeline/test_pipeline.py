"""The state machine of stages, with stages that count: kill it anywhere, run it again."""

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.recipes.pipeline.disk import full_disk_is_an_oserror
from polybasic.recipes.pipeline.running import PipelineStage, Workspace, closure, locked, run_stages
from polybasic.recipes.schema.recipe import Recipe

SCRIPT = '''
"""Three stages that count to four; KILL names the moment at which the process dies."""
import json, os, pathlib, signal, sys
from polybasic.recipes.pipeline import running as pipeline
from polybasic.recipes.schema.recipe import Recipe

out, kill, inputs = pathlib.Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])

def reach(moment):
    with (out.parent / "moments.log").open("a") as log:
        log.write(moment + "\\n")
    if moment == kill:
        os.kill(os.getpid(), signal.SIGKILL)

def stage(name, needs, progress=None):
    def run(workspace, folder):
        path = folder / "count.txt"
        done = path.read_text().split() if path.exists() else []
        for step in range(len(done), 4):
            reach(f"{name} step {step}")
            path.write_text(" ".join([*done, str(step)]))
            done.append(str(step))
        return {"count": len(done)}
    def stage_inputs(workspace):
        return {"own": inputs.get(name), **{need: workspace.identity(need) for need in needs}}
    def identify(workspace, folder):
        return {"text": (folder / "count.txt").read_text(), "own": inputs.get(name)}
    return pipeline.PipelineStage(name, needs, stage_inputs, run, identify, progress)

write_json, rename = pipeline.write_json, pathlib.Path.rename
def watched_write_json(path, content):
    if path.name == "stage.json":
        reach(f"{path.parent.name} before record")
    write_json(path, content)
    if path.name == "stage.json":
        reach(f"{path.parent.name} after record")
def watched_rename(self, target):
    renamed = rename(self, target)
    reach(f"{self.name} renamed")
    return renamed
pipeline.write_json, pathlib.Path.rename = watched_write_json, watched_rename

stages = [stage("a", ()), stage("b", ("a",), ("count.*",)), stage("c", ("a", "b"))]
workspace = pipeline.Workspace(Recipe(name="x", train={"warmup_steps": 0, "num_steps": 1}), out)
with pipeline.locked(out):
    pipeline.run_stages(stages, workspace, None, print)
'''

KILLS = [
    *(f"{name} step 2" for name in "ab"),
    *(f".b.partial {moment}" for moment in ("before record", "after record", "renamed")),
]
"""In a stage that starts over, and in one that goes on where it was."""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, "utf-8")

    def run_script(kill: str = "", **inputs: int) -> subprocess.CompletedProcess:
        command = [sys.executable, script, tmp_path / "out", kill, json.dumps(inputs)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return run_script


def results(out: Path) -> dict[str, str]:
    """Every file below `out`, records without their times."""
    found = {}
    for path in sorted(out.rglob("*")):
        if path.is_file():
            text = path.read_text("utf-8")
            if path.name == "stage.json":
                record = json.loads(text)
                text = json.dumps({**record, "seconds": 0, "finished_at": ""})
            found[str(path.relative_to(out))] = text
    return found


def moments(folder: Path) -> list[str]:
    return (folder / "moments.log").read_text("utf-8").splitlines()


@pytest.mark.parametrize("kill", KILLS)
def test_a_killed_run_continues_and_ends_the_same(kill, run, tmp_path, whole_run) -> None:
    assert run(kill).returncode == -9
    before = moments(tmp_path)
    assert before[-1] == kill
    again = run()
    assert again.returncode == 0, again.stderr
    assert results(tmp_path / "out") == whole_run
    steps = [line for line in moments(tmp_path) if " step " in line]
    killed = kill.strip(".")[0]
    for name in "abc":
        taken = [line for line in steps if line.startswith(name)]
        if name != killed or "after" in kill or "renamed" in kill:
            assert len(taken) == 4, f"{name} was whole and done twice"
        elif name == "b":
            # the step that died is taken again, those before it are not
            assert len(taken) == 4 + (" step " in kill)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "script.py").write_text(SCRIPT, "utf-8")
    command = [sys.executable, folder / "script.py", folder / "out", "", "{}"]
    subprocess.run(command, check=True, capture_output=True)
    found = results(folder / "out")
    assert {name for name in found if name.endswith("count.txt")} == {
        "a/count.txt",
        "b/count.txt",
        "c/count.txt",
    }
    return found


def test_a_replacement_killed_between_its_two_renames_is_finished(run, tmp_path) -> None:
    assert run().returncode == 0
    assert run("b renamed", b=1).returncode == -9
    assert not (tmp_path / "out" / "b").exists()
    assert run(b=1).returncode == 0
    taken = [line for line in moments(tmp_path) if line.startswith("b step")]
    assert len(taken) == 8, "the replacement was whole and done again"
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"a", "b", "c", ".lock"}


def test_nothing_is_done_twice(run, tmp_path) -> None:
    run()
    first = moments(tmp_path)
    again = run()
    assert moments(tmp_path) == first
    assert again.stdout.count("skipped") == 3


def test_changed_inputs_redo_a_stage_and_what_depends_on_it(run, tmp_path) -> None:
    run()
    num_before = len(moments(tmp_path))
    again = run(b=1)
    redone = {line[0] for line in moments(tmp_path)[num_before:] if " step " in line}
    assert redone == {"b", "c"}
    assert "b: starting (changed: own)" in again.stdout
    assert "c: starting (changed: b.own)" in again.stdout


def test_progress_under_other_inputs_is_neither_continued_nor_removed(run, tmp_path) -> None:
    run("b step 2")
    partial = tmp_path / "out" / ".b.partial"
    refused = run(b=1)
    assert refused.returncode == 1
    assert f"b was interrupted with other inputs: {partial} (own was None, now 1)" in refused.stderr
    assert (partial / "count.txt").read_text() == "0 1"
    # the old inputs continue
    assert run().returncode == 0
    taken = [line for line in moments(tmp_path) if line.startswith("b step")]
    assert taken == [f"b step {step}" for step in (0, 1, 2, 2, 3)]


def test_progress_that_was_removed_and_leftovers_without_any_are_forgotten(run, tmp_path) -> None:
    run("b step 2")
    (tmp_path / "out" / ".b.partial" / "count.txt").unlink()
    run("a step 2", a=1)  # a stage that starts over leaves no progress
    assert run(a=2, b=1).returncode == 0
    assert (tmp_path / "out" / "b" / "count.txt").read_text() == "0 1 2 3"


def test_a_second_run_is_refused_while_the_first_lives(tmp_path) -> None:
    refused = pytest.raises(UserError, match="another run is writing there")
    with locked(tmp_path), refused, locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def workspace_with(tmp_path: Path) -> Workspace:
    return Workspace(Recipe(name="x", train={"warmup_steps": 0, "num_steps": 1}), tmp_path)


def stage_that(
    run: Callable[[Path], None], name: str = "a", progress: tuple[str, ...] | None = None
) -> PipelineStage:
    def run_in(workspace: Workspace, folder: Path) -> dict:
        run(folder)
        return {}

    return PipelineStage(
        name, (), lambda workspace: {}, run_in, lambda workspace, folder: {}, progress
    )


def write_on_a_full_disk(folder: Path) -> None:
    (folder / "weights").symlink_to("/dev/full")
    (folder / "weights").write_bytes(b"1")


def raise_like_safetensors(folder: Path) -> None:
    raise ValueError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("failing", [write_on_a_full_disk, raise_like_safetensors])
@pytest.mark.parametrize("progress", [None, ()])
def test_a_full_disk_is_one_line_and_keeps_what_is_whole(failing, progress, tmp_path) -> None:
    stages = [stage_that(lambda folder: None), stage_that(failing, "b", progress)]
    with pytest.raises(UserError, match="disk full"):
        run_stages(stages, workspace_with(tmp_path), None, lambda line: None)
    assert (tmp_path / "a" / "stage.json").is_file()
    assert not (tmp_path / "b").exists()
    assert (tmp_path / ".b.partial").exists() == (progress is not None)


def test_other_errors_keep_their_type(tmp_path) -> None:
    with pytest.raises(ZeroDivisionError), full_disk_is_an_oserror(tmp_path):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError), full_disk_is_an_oserror(tmp_path):
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")


def test_torch_save_on_a_full_disk_is_recognized(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("polybasic.recipes.pipeline.disk.free_bytes", lambda path: 0)
    refused = pytest.raises(OSError, match="No space left")
    with refused as caught, full_disk_is_an_oserror(tmp_path):
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("text", ["{", "{}", '{"digest": 1}'])
def test_a_damaged_record_is_told(text, tmp_path) -> None:
    stage = stage_that(lambda folder: None)
    run_stages([stage], workspace_with(tmp_path), None, lambda line: None)
    (tmp_path / "a" / "stage.json").write_text(text, "utf-8")
    with pytest.raises(UserError, match="stage record"):
        run_stages([stage], workspace_with(tmp_path), None, lambda line: None)


def test_closure_takes_what_is_needed_and_keeps_the_order() -> None:
    def needing(name: str, *needs: str) -> PipelineStage:
        return PipelineStage(name, needs, lambda w: {}, lambda w, f: {}, lambda w, f: {})

    stages = [needing("a"), needing("b", "a"), needing("c", "a"), needing("d", "b", "c")]
    assert [stage.name for stage in closure(stages, ["c"])] == ["a", "c"]
    assert [stage.name for stage in closure(stages, ["d"])] == ["a", "b", "c", "d"]
    assert closure(stages, None) == stages
