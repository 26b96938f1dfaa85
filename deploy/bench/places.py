"""Where in a chain a report lies: beside one of other conditions, which it does not replace."""

import re
from pathlib import Path
from typing import Any, get_args

from polybasic.chain.base.readable import counted
from polybasic.chain.formats.describe import measured_on
from polybasic.chain.formats.files import read_json
from polybasic.deploy.planner.settings import BenchSettings, SystemName


def report_place(chain: Path, settings: BenchSettings, prompts: str, hardware: str) -> Path:
    """The folder of a report: `report` in the chain, or one in it that names what differs.

    A report of the same machine, dtype, temperature, rule, prompts and number of tokens is
    replaced, unless it has more prompts or repeats, or other systems.

    Args:
        settings: with the dtype that is served.
        prompts: what people call them.
        hardware: as plans name it.

    Raises:
        UserError: the report that is there is damaged.
    """
    usual = chain / "report"
    if not (usual / "report.json").is_file():
        return usual
    kept = read_json(usual / "report.json", "report")
    asked = settings.model_dump(mode="json") | {"prompts": prompts}
    there = _conditions(kept.get("settings", {}), measured_on(kept))
    differing = [condition for condition in _conditions(asked, hardware) if condition not in there]
    alike = usual / "-".join(differing) / "report.json"
    less = _less(settings, read_json(alike, "report")) if alike.is_file() else []
    return usual / "-".join([*differing, *map(_as_part, less)])


def _conditions(settings: dict[str, Any], hardware: str) -> list[str]:
    """As parts of a folder's name."""
    named = (
        hardware,
        f"{settings.get('dtype')}",
        f"temperature {settings.get('temperature', 0.0):g}",
        f"rule {settings.get('rule', 'auto')}",
        f"prompts {settings.get('prompts')}",
        f"{settings.get('max_new_tokens')} tokens",
    )
    return [_as_part(condition) for condition in named]


def _less(settings: BenchSettings, kept: dict[str, Any]) -> list[str]:
    """What is measured of less than in a report."""
    before, less = kept.get("settings", {}), []
    if (num := settings.num_prompts_per_task) < before.get("num_prompts_per_task", 0):
        less.append(f"{counted(num, 'prompt')} a task")
    if (num := settings.repeats) < before.get("repeats", 0):
        less.append(counted(num, "repeat"))
    own = {*get_args(SystemName)} & {*kept.get("systems", {})}
    if not own | {*before.get("peers", ())} <= {*settings.expected_systems, *settings.peers}:
        less.append(f"systems {' '.join((*settings.systems, *settings.peers))}")
    return less


def _as_part(condition: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", condition.lower()).strip("-.")
