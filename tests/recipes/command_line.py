"""`polybasic` called in the process of the test, and what it says of mistakes."""

import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from polybasic.chain.base.errors import UserError
from polybasic.deploy.runtime import hardware
from polybasic.recipes.cli import main as cli
from polybasic.recipes.schema.loading import load_recipe


def call(*arguments: object) -> tuple[int, str, str]:
    """`polybasic ARGUMENTS`: exit code, stdout, stderr."""
    out, err, wide = io.StringIO(), io.StringIO(), patch.dict(os.environ, COLUMNS="120")
    with pytest.raises(SystemExit) as caught, redirect_stdout(out), redirect_stderr(err), wide:
        cli.main(list(map(str, arguments)))
    return int(caught.value.code or 0), out.getvalue(), err.getvalue()


def refusal(*arguments: object) -> str:
    """The one line of a user error; libraries may have warned before it."""
    code, out, err = call(*arguments)
    assert code == 2, err
    assert out == ""
    *before, line = err.strip().splitlines()
    assert line.startswith("error: ")
    assert not any(other.startswith(("error: ", "Traceback")) for other in before)
    return line


def recipe_refusal(path: str, *overrides: str) -> str:
    """The one line with which a recipe is refused."""
    with pytest.raises(UserError) as caught:
        load_recipe(path, list(overrides))
    line = str(caught.value)
    assert "\n" not in line
    return line


def with_plan(chain: Path) -> None:
    """Declare the chain's plan as measured here, so that bench does not measure one first."""
    manifest = json.loads((chain / "chain.json").read_text("utf-8"))
    manifest.pop("sha256", None)
    name = hardware.hardware_name(torch.device("cpu"))
    measured = {"hardware": name, "temperature": 0, "seconds_per_token": 1}
    manifest["plans"] = [
        {**measured, "dtype": dtype, "plan": manifest["plan"]} for dtype in ("bfloat16", "float32")
    ]
    (chain / "chain.json").write_text(json.dumps(manifest), "utf-8")
