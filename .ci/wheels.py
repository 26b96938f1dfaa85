"""Builds wheels that bring the CPU kernels compiled, so that their users need no compiler.

    python .ci/wheels.py FOLDER [PLATFORM ...]

One wheel for each of `PLATFORMS`, or of those that are named, with a library for each instruction
set of its processors, of which the best that a processor has is loaded. zig compiles all of them on
one machine; those for Linux against a C library that is old enough for manylinux2014, and
`auditwheel` checks that they need nothing newer or foreign. POLYBASIC_ISA names the only
instruction set of a wheel that is for one kind of processor.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CONTENT = ("chain", "train", "quantize", "deploy", "recipes", "__main__.py", "pyproject.toml")
CONTENT += ("__init__.py", "py.typed", "setup.py")
DOCUMENTS = ("README.md", "LICENSE")


class Platform(NamedTuple):
    """What a wheel runs on.

    Attributes:
        target: as zig names it, with the oldest version of what is linked against.
        architecture: a key of `INSTRUCTION_SETS`.
        tag: in the wheel's name.
    """

    target: str
    architecture: str
    tag: str

    @property
    def is_linux(self) -> bool:
        return self.tag.startswith("manylinux")


PLATFORMS = {
    "linux-x86_64": Platform("x86_64-linux-gnu.2.17", "x86_64", "manylinux_2_17_x86_64"),
    "linux-aarch64": Platform("aarch64-linux-gnu.2.17", "aarch64", "manylinux_2_17_aarch64"),
    "macos-arm64": Platform("aarch64-macos.11.0", "aarch64", "macosx_11_0_arm64"),
    "macos-x86_64": Platform("x86_64-macos.11.0", "x86_64", "macosx_11_0_x86_64"),
}


def main() -> None:
    folder, names = Path(sys.argv[1]).absolute(), sys.argv[2:] or [*PLATFORMS]
    if unknown := [name for name in names if name not in PLATFORMS]:
        sys.exit(f"error: unknown platform: {unknown[0]}; use {', '.join(PLATFORMS)}")
    with tempfile.TemporaryDirectory() as scratch:
        # the folders are the package, which they find by the name of this link
        link = Path(scratch) / "import" / "polybasic"
        link.parent.mkdir()
        link.symlink_to(ROOT)
        sys.path.insert(0, str(link.parent))
        for name in names:
            build(PLATFORMS[name], Path(scratch) / name, folder)


def build(platform: Platform, copy: Path, folder: Path) -> None:
    """A wheel in `folder`, made in a copy of what is packaged."""
    from polybasic.chain.base.caching import cache_folder
    from polybasic.chain.kernels.cpu.build import compile_library, prebuilt_name
    from polybasic.chain.kernels.cpu.compilers import zig
    from polybasic.chain.kernels.cpu.instruction_sets import INSTRUCTION_SETS
    from polybasic.chain.kernels.environment import isa_wanted

    copy.mkdir()
    for name in (*CONTENT, *DOCUMENTS):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    compiler = zig(platform.target)
    assert compiler is not None, "the package ziglang is missing"
    prebuilt = copy / "chain" / "kernels" / "cpu" / "prebuilt"
    prebuilt.mkdir()
    sets = INSTRUCTION_SETS[platform.architecture]
    wanted = [one for one in sets if isa_wanted() in (None, one.name)]
    assert wanted, f"{platform.architecture} has no {isa_wanted()}"
    for isa in wanted:
        compile_library(compiler, isa, prebuilt / prebuilt_name(isa.name), cache_folder())
    python = (sys.executable, "-m")
    made = copy / "wheels"
    built_for = f"linux_{platform.architecture}" if platform.is_linux else platform.tag
    run(
        *(*python, "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
        f"--config-settings=--build-option=--plat-name={built_for}",
        *("--wheel-dir", str(made), str(copy)),
    )
    (wheel,) = made.glob("*.whl")
    if platform.is_linux:
        # it knows the platforms of this machine's architecture alone, but finds out the wheel's own
        repaired = copy / "repaired"
        run(*python, "auditwheel", "repair", "--plat", "auto", "-w", str(repaired), str(wheel))
        (wheel,) = repaired.glob("*.whl")
    assert platform.tag in wheel.name, f"{wheel.name} needs more than {platform.tag}"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.move(wheel, folder / wheel.name)


def run(*command: str) -> None:
    """Run a command, found beside this Python, too.

    Raises:
        CalledProcessError: it fails.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run(command, check=True, env={**os.environ, "PATH": path})


if __name__ == "__main__":
    main()
