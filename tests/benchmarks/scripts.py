"""The benchmarks are scripts, in no package; tests call their functions."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).parents[2] / "benchmarks"


def load_script(name: str) -> ModuleType:
    """`benchmarks/<name>.py` as a module, once."""
    known = f"benchmarks_{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, _FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[known] = module  # where dataclasses look for their own module
        spec.loader.exec_module(module)
    return sys.modules[known]
