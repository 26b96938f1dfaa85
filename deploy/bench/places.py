"""Where in a chain a report lies: beside one of other conditions, which it does not replace."""

import re
from pathlib import Path
from typing import Any

from polybasic.chain.formats.describe import measured_on
from polybasic.chain.formats.files import read_json
from polybasic.deploy.settings import BenchSettings


def report_place(chain: Path, settings: BenchSettings, prompts: str, hardware: str) -> Path:
    """The folder of a report: `report` in the chain, or one in it that names what differs.

    A report of the same machine, dtype, temperature, rule, prompts and number of tokens is
    replaced.

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
    differing = [one for one in _conditions(asked, hardware) if one not in there]
    return usual / "-".join(differing) if differing else usual


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
    return [re.sub(r"[^a-z0-9.]+", "-", one.lower()).strip("-.") for one in named]
