"""The files of deploy/images, read."""

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
IMAGES = ROOT / "deploy" / "images"
PORT = 8000


def text_of(name: str) -> str:
    return (IMAGES / name).read_text()


def steps(dockerfile: str) -> list[tuple[str, str]]:
    """Instructions and their arguments, continued lines joined and comments left out."""
    lines = [line for line in text_of(dockerfile).splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line]  # type: ignore[misc]


def of(dockerfile: str, instruction: str) -> list[str]:
    return [argument for name, argument in steps(dockerfile) if name == instruction]


def kubernetes(kind: str) -> dict[str, Any]:
    [found] = [
        each for each in yaml.safe_load_all(text_of("kubernetes.yaml")) if each["kind"] == kind
    ]
    return found


def compose() -> dict[str, Any]:
    return yaml.safe_load(text_of("compose.yaml"))


def run(*command: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, **settings)
