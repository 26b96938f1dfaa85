"""The example of time series: speculative forecasts have the target's law, lossy ones have not.

Samples are compared by Kolmogorov and Smirnov's largest gap. The seeds are fixed; an example that
is right passes the bound with one set of them in a thousand.
"""

import subprocess
import sys
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Independent, Normal

PATH = Path(__file__).parent.parent / "examples" / "time_series.py"
SOURCE = PATH.read_text("utf-8")
NUM = 1200
BOUND = 1.95 * sqrt(2 / NUM)
SIZES = {"PATCH": 2, "HORIZON": 3, "NUM_DRAFTED": 2}
WRONG = {
    "rejected patches that are drawn from the target": (
        "residual(p, q) if tolerance is None else p.sample()",
        "p.sample()",
    ),
    "acceptance in a third of the cases that it should be": (
        "torch.rand(()) < ratio",
        "3 * torch.rand(()) < ratio.clamp(max=1)",
    ),
    "a draft that is judged by its own law": (
        "p, patch = law_at(laws, place - 1), patches[0, place]",
        "p, patch = q, patches[0, place]",
    ),
    "patches behind the rejected one that are kept": (
        "patches = torch.cat([patches[:, :place], own[None, None]], dim=1)",
        "patches = torch.cat([patches, own[None, None]], dim=1)",
    ),
}


def load(old: str = "", new: str = "", **constants: Any) -> Any:
    """The example, with one piece of its text replaced, and with other constants."""
    assert SOURCE.count(old) == 1 or not old
    module = ModuleType("time_series")
    sys.modules["time_series"] = module  # for its dataclass
    exec(compile(SOURCE.replace(old, new), PATH, "exec"), module.__dict__)
    module.__dict__.update(constants)
    return module


def autoregressive(share: float, scale: float) -> Callable[[Tensor], Independent]:
    """A model whose next patch is a share of the last one."""

    def law(patches: Tensor) -> Independent:
        return Independent(Normal(share * patches, torch.full_like(patches, scale)), 1)

    return law


TARGET, DRAFT = autoregressive(0.9, 1.0), autoregressive(0.5, 1.4)


def forecasts(example: Any, draft: Any, tolerance: float | None = None) -> tuple[Tensor, Any]:
    """[NUM, HORIZON, PATCH], and what they counted."""
    counts = example.Counts()
    past = torch.full((2, SIZES["PATCH"]), 2.0)
    drawn = [example.forecast(TARGET, draft, past, counts, tolerance) for _ in range(NUM)]
    return torch.stack(drawn), counts


def gaps(example: Any, first: Tensor, second: Tensor) -> list[float]:
    """Of each value, and of what changes from one to the next."""
    features = [torch.cat([each.flatten(1), each.flatten(1).diff()], 1) for each in (first, second)]
    return [example.largest_gap(*pair) for pair in zip(*(each.T for each in features), strict=True)]


def test_speculative_forecasts_have_the_targets_law() -> None:
    torch.manual_seed(1)
    example = load(**SIZES)
    direct, alone = forecasts(example, None)
    drafted, counts = forecasts(example, DRAFT)
    assert max(gaps(example, direct, drafted)) < BOUND
    assert (alone.target_passes, alone.drafted) == (NUM * SIZES["HORIZON"], 0)
    assert counts.target_passes < 0.8 * alone.target_passes
    assert 0.3 < counts.accepted / counts.drafted < 0.8
    lossy, more = forecasts(example, DRAFT, tolerance=1e9)
    assert more.accepted == more.drafted
    assert max(gaps(example, direct, lossy)) > 1.5 * BOUND


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_forecast_is_noticed(what: str) -> None:
    torch.manual_seed(2)
    example = load(*WRONG[what], **SIZES)
    direct, _ = forecasts(example, None)
    drafted, _ = forecasts(example, DRAFT)
    assert max(gaps(example, direct, drafted)) > 1.2 * BOUND


def test_the_largest_gap() -> None:
    example = load()
    first, second = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([3.0, 4.0, 5.0, 6.0])
    assert example.largest_gap(first, second) == 0.5
    assert example.largest_gap(first, first) == 0


def run(monkeypatch: pytest.MonkeyPatch, example: Any, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["time_series.py", *arguments])
    example.main()


def test_a_file_is_forecast_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load(NUM_FORECASTS=3, TARGET_SIZE=(32, 1), DRAFT_SIZE=(16, 1))
    series = tmp_path / "series.csv"
    series.write_text("day,load\n" + "".join(f"{day},{day % 7}\n" for day in range(2000)))
    picture = tmp_path / "picture.svg"
    asked = ["--csv", str(series), "--column", "load", "--minutes", "0.02"]
    run(monkeypatch, example, *asked, "--picture", str(picture))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "target:", "draft:", "target", "lossless", "lossy,", "gap:",
    ]  # fmt: skip
    assert picture.read_text().startswith("<?xml")
    for text, fault in (
        ("day,load\n1,2\n", "1 rows, at least 896"),
        ("day,load\n1,two\n", "no number in column 'load'"),
        ("day,value\n1,2\n", "no such column: 'load' in .*columns are: day, value"),
    ):
        series.write_text(text)
        with pytest.raises(SystemExit, match=fault):
            run(monkeypatch, example, *asked)


def test_it_says_how_it_is_called() -> None:
    done = subprocess.run([sys.executable, PATH, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--csv" in done.stdout
