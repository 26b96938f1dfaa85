"""Where tests run: in processes that see no GPU, or by `make gpu` in processes that do."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import pytest_collection_modifyitems, pytest_configure


def test_no_process_of_tests_sees_a_gpu() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert os.environ["DS_ACCELERATOR"] == "cpu"


def test_a_gpu_that_is_asked_for_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest_configure()
    monkeypatch.setenv("TEST_ON_GPU", "1")
    with pytest.raises(pytest.UsageError, match="finds no GPU"):
        pytest_configure()


@pytest.mark.parametrize("has_gpu", [False, True])
def test_tests_of_a_gpu_and_all_others_run_apart(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = {"other": None, "either": pytest.mark.gpu, "gpu": pytest.mark.gpu(needed=True)}

    def item(name: str) -> Any:
        mark = marks[name]
        closest = None if mark is None else mark.mark
        return SimpleNamespace(name=name, get_closest_marker=lambda asked: closest)

    left_out: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    items: list[Any] = [item(name) for name in marks]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    pytest_collection_modifyitems(SimpleNamespace(hook=hook), items)
    assert [collected.name for collected in items] == (
        ["either", "gpu"] if has_gpu else ["other", "either"]
    )
    assert [collected.name for collected in left_out] == (["other"] if has_gpu else ["gpu"])
