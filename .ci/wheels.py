"""Builds wheels that bring the CPU kernels compiled, so that their users need no compiler.

    python .ci/wheels.py FOLDER [ARCHITECTURE ...]

One wheel for each architecture, with a library for each of its instruction sets, of which the best
that a processor has is loaded. zig compiles all of them on one machine, against a C library that is
old enough for manylinux2014, and `auditwheel` checks that nothing newer or foreign is needed.
POLYBASIC_ISA names the only instruction set of a wheel that is for one kind of processor.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONTENT = ("chain", "train", "quantize", "deploy", "recipes", "__main__.py", "pyproject.toml")
CONTENT += ("setup.py",)
DOCUMENTS = ("README.md", "LICENSE")
OLDEST_LIBC = "2.17"


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as scratch:
        # the folders are the package, which they find by the name of this link
        link = Path(scratch) / "import" / "polybasic"
        link.parent.mkdir()
        link.symlink_to(ROOT)
        sys.path.insert(0, str(link.parent))
        for architecture in sys.argv[2:] or ("x86_64", "aarch64"):
            build(architecture, Path(scratch) / architecture, folder)


def build(architecture: str, copy: Path, folder: Path) -> None:
    """A wheel in `folder`, made in a copy of what is packaged."""
    from polybasic.chain.caching import cache_folder
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
    compiler = zig(f"{architecture}-linux-gnu.{OLDEST_LIBC}")
    assert compiler is not None, "the package ziglang is missing"
    prebuilt = copy / "chain" / "kernels" / "cpu" / "prebuilt"
    prebuilt.mkdir()
    wanted = [one for one in INSTRUCTION_SETS[architecture] if isa_wanted() in (None, one.name)]
    assert wanted, f"{architecture} has no {isa_wanted()}"
    for isa in wanted:
        compile_library(compiler, isa, prebuilt / prebuilt_name(isa.name), cache_folder())
    platform = f"manylinux_{OLDEST_LIBC.replace('.', '_')}_{architecture}"
    python = (sys.executable, "-m")
    made = copy / "wheels"
    run(
        *(*python, "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
        f"--config-settings=--build-option=--plat-name=linux_{architecture}",
        *("--wheel-dir", str(made), str(copy)),
    )
    (wheel,) = made.glob("*.whl")
    # it knows the platforms of this machine's architecture alone, but finds out the wheel's own
    repaired = copy / "repaired"
    run(*python, "auditwheel", "repair", "--plat", "auto", "-w", str(repaired), str(wheel))
    (wheel,) = repaired.glob("*.whl")
    assert platform in wheel.name, f"{wheel.name} needs more than {platform}"
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
