"""Whether the code keeps within its budget: lines by top-level folder, files by folder.

    python .ci/lines.py

A capability that needs more raises its folder's budget in the change that brings it, and says so;
whatever becomes smaller lowers it.
"""

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".py", ".cpp", ".h", ".inc", ".js", ".css", ".html"}
LINES = {
    "chain": 30_395,
    "deploy": 34_085,
    "quantize": 1_400,
    "recipes": 8_670,
    "train": 9_085,
    "benchmarks": 8_910,
    "tests": 67_750,
}
FILES = 20
"""Of code in one folder of the product, those in folders below it not counted."""


def main() -> int:
    """Print what is over its budget."""
    faults = []
    for top, most in LINES.items():
        files = [path for path in (ROOT / top).rglob("*") if path.suffix in SUFFIXES]
        num = sum(len(path.read_bytes().splitlines()) for path in files)
        if num > most:
            faults.append(f"{top}: {num:,} lines, of which {most:,} may be")
        if top in ("benchmarks", "tests"):
            continue
        for folder, num_files in Counter(path.parent.relative_to(ROOT) for path in files).items():
            if num_files > FILES:
                faults.append(f"{folder}: {num_files} files, of which {FILES} may be")
    for fault in faults:
        print(fault, file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
