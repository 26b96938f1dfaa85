"""The kernels for each instruction set, by harness: the same bits alone and in company, the
numbers of the portable ones, and the reference's noise. Those of ARM run in an emulator of a
processor that has no more."""

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from polybasic.chain.kernels.cpu.build import SOURCE_FOLDER, built_library
from polybasic.chain.kernels.cpu.compilers import Compiler, need_compiler
from polybasic.chain.kernels.cpu.instruction_sets import (
    INSTRUCTION_SETS,
    InstructionSet,
    known_sets,
)
from polybasic.chain.kernels.noise import gumbel_noise, noise_key

HARNESS = Path(__file__).with_name("passes_harness.cpp")
OF_KERNELS = [
    str(Path(__file__).with_name(name))
    for name in ("test_passes.py", "test_noise.py", "test_sampling.py")
]
EMULATOR, CROSS_COMPILER = "qemu-aarch64", "aarch64-linux-gnu-g++"
# processors with these instructions and no newer ones that the kernels have code for
EMULATED = {
    "neon": "cortex-a53",
    "neon-dotprod": "cortex-a76",
    "neon-bf16": "max",
}
TOLERANCE = {
    "float32": 2e-5,
    "bfloat16": 3e-2,
    "int4-float32": 3e-2,
    "int4-bfloat16": 3e-2,
    "blocks4-float32": 3e-2,
    "blocks5-float32": 3e-2,
    "blocks8-float32": 3e-2,
    "nested4-float32": 3e-2,
    "nested6-float32": 3e-2,
}

pytestmark = pytest.mark.proof
Numbers = dict[str, list[str]]


def here(isa: InstructionSet, folder: Path) -> Path:
    """The harness as an executable of this machine's, with the library that serves."""
    compiler = need_compiler()
    library = built_library(compiler, isa)
    flags = "-O1", "-std=c++17", f"-I{SOURCE_FOLDER}", "-pthread"
    built = folder / isa.name
    command = [*compiler.command, *flags, str(HARNESS), str(library), "-o", str(built)]
    subprocess.run(command, check=True)
    return built


def elsewhere(isa: InstructionSet, folder: Path) -> Path:
    """The harness with the kernels, as an executable for ARM that needs no library."""
    path = shutil.which(CROSS_COMPILER)
    if path is None:
        pytest.skip(f"{CROSS_COMPILER} is not installed")
    flags = Compiler((path,), CROSS_COMPILER, "").flags(isa)
    # half the time, and emulated it runs as fast
    flags = tuple("-O1" if flag == "-O3" else flag for flag in flags)
    units = [str(path) for path in (HARNESS, *sorted(SOURCE_FOLDER.rglob("*.cpp")))]
    linked = ("-static", "-pthread", "-Wl,--whole-archive", "-lpthread", "-Wl,--no-whole-archive")
    built = folder / isa.name
    command = [path, *flags, f"-I{SOURCE_FOLDER}", *units, *linked, "-o", str(built)]
    subprocess.run(command, check=True)
    return built


def output_of(program: Path, *emulator: str) -> Numbers:
    ran = subprocess.run([*emulator, str(program)], stdout=subprocess.PIPE, text=True, check=True)
    lines = [line.split() for line in ran.stdout.splitlines()]
    return {name: numbers for name, *numbers in lines}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    """Of the portable kernels on this machine, which PyTorch's operations are compared with."""
    (portable,) = (known for known in known_sets() if known.name == "portable")
    return output_of(here(portable, tmp_path_factory.mktemp("portable")))


def difference(found: list[str], expected: list[str]) -> float:
    """The norm of the difference over that of what is expected."""
    pairs = [(float(x), float(y)) for x, y in zip(found, expected, strict=True)]
    norm = math.sqrt(sum(y * y for _, y in pairs))
    return math.sqrt(sum((x - y) ** 2 for x, y in pairs)) / norm


def check(found: Numbers, expected: Numbers) -> None:
    noise = gumbel_noise(noise_key(3), torch.tensor([0, 7408, 2**32 - 1]), 1000).flatten()
    for name in ("noise/1", "noise/2"):
        own = torch.tensor([float(number) for number in found[name]])
        assert torch.equal(own.view(torch.int32), noise.view(torch.int32)), name
    for kind in TOLERANCE:
        of_kind = {
            name.removeprefix(f"{kind}/"): numbers
            for name, numbers in found.items()
            if name.startswith(f"{kind}/")
        }
        alone = {name[2:]: numbers for name, numbers in of_kind.items() if name[0] == "1"}
        beside = {name[2:]: numbers for name, numbers in of_kind.items() if name[0] == "2"}
        for name, numbers in alone.items():
            assert numbers == beside[name], f"{kind}: threads, {name}"
        for arranged in ("product/5", "product/24", "product/31"):
            assert alone[arranged] == alone["product/1"], f"{kind}: {arranged}"
        assert alone["text/37"] == alone["text/1"], f"{kind}: a text at once, and word by word"
        assert alone["tree/10"] == alone["tree/1"], f"{kind}: a tree, and the text of each path"
        for name, numbers in alone.items():
            known = expected[f"{kind}/1/{name}"]
            if name == "draft/tokens":
                assert kind != "float32" or numbers == known
            elif name == "draft/scores":  # below the first level, near ties change places
                assert difference(numbers[:4], known[:4]) < TOLERANCE[kind], f"{kind}: {name}"
            else:
                assert difference(numbers, known) < TOLERANCE[kind], f"{kind}: {name}"
                # rows in another order are another result
                half = len(known) // 2
                assert difference(numbers[half:] + numbers[:half], known) > 0.5


@pytest.mark.parametrize("name", [isa.name for isa in INSTRUCTION_SETS["x86_64"][1:]])
def test_kernels_of_this_processor(name: str, expected: Numbers, tmp_path: Path) -> None:
    isa = next((known for known in known_sets() if known.name == name), None)
    if isa is None or isa.missing:
        pytest.skip(f"this processor has no {name}")
    check(output_of(here(isa, tmp_path)), expected)


# the portable ones are the same everywhere
@pytest.mark.parametrize("name", [isa.name for isa in INSTRUCTION_SETS["aarch64"][1:]])
def test_kernels_of_arm_processors(name: str, expected: Numbers, tmp_path: Path) -> None:
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"{EMULATOR} is not installed")
    isa = next(known for known in INSTRUCTION_SETS["aarch64"] if known.name == name)
    program = elsewhere(isa, tmp_path)
    check(output_of(program, EMULATOR, "-cpu", EMULATED[name]), expected)
    if name == "neon-bf16":  # the emulator knows what a processor lacks
        with pytest.raises(subprocess.CalledProcessError):
            output_of(program, EMULATOR, "-cpu", EMULATED["neon"])


@pytest.mark.parametrize("name", ["portable", "avx2", "avx512"])
def test_passes_and_noise_are_those_of_pytorch(name: str) -> None:
    isa = next((known for known in known_sets() if known.name == name), None)
    if isa is None or isa.missing:
        pytest.skip(f"this processor has no {name}")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not proof", *OF_KERNELS]
    environment = {**os.environ, "POLYBASIC_ISA": name, "POLYBASIC_KERNELS": "native"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
