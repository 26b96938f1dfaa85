"""A small chain in the shapes of a large model: it answers as before, at the large model's cost.

    python benchmarks/grow.py CHAIN SHAPE --out FOLDER [--target PATH]

The target must be a Llama without biases, the other members its 4-bit copies and EAGLE-2 or
block-parallel heads. The new chain holds all of them, and everything made from it says that it was
grown. Shapes: gpu-7b (Llama-2-7B's) and gpu-8b (Llama-3-8B's).
"""

import argparse
import shlex
import sys
from pathlib import Path

from command import run
from growth.chain import grow_chain
from growth.shapes import SHAPES, shape_named

from polybasic.chain.formats.chains import resolve_chain
from polybasic.chain.formats.files import disk_errors
from polybasic.recipes.pipeline.disk import full_disk_is_an_oserror


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("chain", metavar="CHAIN", help="folder or hub id of a chain")
    parser.add_argument("shape", metavar="SHAPE", help=" or ".join(SHAPES))
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="to write")
    parser.add_argument("--target", metavar="PATH", help="folder or hub id of the chain's target")
    arguments = parser.parse_args()
    name, out = arguments.shape, arguments.out
    shape, folder = shape_named(name), resolve_chain(arguments.chain)
    with disk_errors(out), full_disk_is_an_oserror(out):
        grow_chain(folder, shape, name, out, target=arguments.target)
    print(out)
    written = shlex.quote(str(out))
    print(f"next: polybasic plan {written}, then polybasic bench {written}", file=sys.stderr)


if __name__ == "__main__":
    run(main)
