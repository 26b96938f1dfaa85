"""A training that is left to the machine keeps the dtype that it was begun in."""

from pathlib import Path
from typing import Any

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.recipes.pipeline.dtypes import settle_dtype
from polybasic.recipes.pipeline.running import PipelineStage, Workspace, run_stages, started_inputs
from polybasic.recipes.schema.recipe import Recipe


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Its "fastest" dtype, which a test changes: the run is continued on another machine."""
    found = {"fastest": "float32"}
    monkeypatch.setattr(
        "polybasic.train.dtypes.settled",
        lambda settings: settings.model_copy(update={"dtype": found["fastest"]}),
    )
    return found


def train(out: Path, *, stops: bool = False, **changes: Any) -> list[str]:
    """Run a stage that trains; the dtypes that it was run in."""
    ran: list[str] = []

    def inputs(workspace: Workspace) -> dict[str, Any]:
        settings = workspace.recipe.train
        given = {"train": settings.model_dump(mode="json"), "seed": workspace.recipe.seed}
        return settle_dtype(workspace, "draft", given, settings)

    def run(workspace: Workspace, folder: Path) -> dict[str, Any]:
        ran.append(started_inputs(folder)["train"]["dtype"])
        (folder / "state.pt").touch()
        if stops:
            raise KeyboardInterrupt
        return {}

    stage = PipelineStage("draft", (), inputs, run, lambda workspace, folder: {}, ("state.pt",))
    workspace = Workspace(Recipe.model_validate({"name": "a", "train": changes}), out)
    try:
        run_stages([stage], workspace, None, lambda line: None)
    except KeyboardInterrupt:
        assert stops
    return ran


def test_what_is_whole_stays_whole_on_another_machine(
    tmp_path: Path, machine: dict[str, str]
) -> None:
    assert train(tmp_path) == ["float32"]
    machine["fastest"] = "bfloat16"
    assert train(tmp_path) == []
    assert train(tmp_path, dtype="float32") == [], "named now, and the same"
    assert train(tmp_path, dtype="bfloat16") == ["bfloat16"]
    assert train(tmp_path, batch_size=8) == ["bfloat16"], "made anew, in what is fast now"
    machine["fastest"] = "float32"
    assert train(tmp_path, batch_size=8) == []
    assert train(tmp_path, batch_size=4) == ["float32"]


def test_what_was_begun_is_continued_in_its_dtype(tmp_path: Path, machine: dict[str, str]) -> None:
    assert train(tmp_path, stops=True) == ["float32"]
    machine["fastest"] = "bfloat16"
    assert train(tmp_path, stops=True) == ["float32"]
    with pytest.raises(UserError, match=r"\(train.dtype was float32, now bfloat16\)"):
        train(tmp_path, dtype="bfloat16")
    assert train(tmp_path) == ["float32"]
