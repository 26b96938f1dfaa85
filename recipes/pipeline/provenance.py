"""Which code and which packages a result came from."""

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_VERSIONED = ("polybasic", "torch", "transformers", "deepspeed", "autoawq", "datasets")


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that results depend on."""
    versions = {}
    for package in _VERSIONED:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def git_commit() -> str | None:
    """Commit of the checkout that this code runs from, "-dirty" if changed; else None."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return None
    return found.stdout.strip() or None
