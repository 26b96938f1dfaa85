"""The benchmarks are scripts, in no package; tests call their functions."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).parents[2] / "benchmarks"


def load_script(name: str) -> ModuleType:
    """`benchmarks/<name>.py`, a dot for a slash, as a module, once, as other scripts import it."""
    if str(_FOLDER) not in sys.path:
        sys.path.append(str(_FOLDER))
    module = importlib.import_module(name)
    path = _FOLDER / f"{name.replace('.', '/')}.py"
    assert module.__file__ == str(path), f"another module {name}"
    return module
