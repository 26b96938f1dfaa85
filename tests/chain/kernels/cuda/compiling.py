"""Triton kernels compiled for a GPU that need not be there, and what became of them.

The compiler runs in a process of its own, where kernels are not interpreted.
"""

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CAPABILITIES = (80, 90)
"""Ampere and Hopper, as Triton names them."""
MOST_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Of one program, by capability (CUDA C++ Programming Guide, technical specifications)."""

_ALIGNED = 16
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)


@dataclass(frozen=True)
class Request:
    """A kernel and what it is specialized for.

    Attributes:
        module: dotted name of the kernel's module.
        kernel: its name there.
        signature: type of each argument that is no constant, by name: "*bf16", "*fp16", "*fp32",
            "*i32", "*i64", "*i1" (a bool tensor), "i32", "fp32", ...
        constants: values of `tl.constexpr` arguments, and of others that are fixed (None, 1).
        unaligned: pointers and integers that are not known to be multiples of 16; all others
            are, as for tensors that PyTorch allocated and sizes that such tensors have.
        capability: one of `CAPABILITIES`.
        options: num_warps, num_stages, maxnreg.
    """

    module: str
    kernel: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    unaligned: tuple[str, ...] = ()
    capability: int = 90
    options: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Compiled:
    """What a kernel became.

    Attributes:
        registers: of a thread.
        stack_bytes: of a thread; spilled registers lie there, so none where it is 0.
        shared_bytes: of a program.
        ttgir: Triton's last form of it, with layouts.
        ptx: as given to ptxas.
        sass: machine code, one instruction a line, after its address.
        arguments: names of the parameters in `ptx`, in their order.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    ttgir: str
    ptx: str
    sass: str
    arguments: Sequence[str]

    def loop(self) -> "Compiled":
        """The longest innermost loop in place of the whole machine code."""
        lines = self.sass.splitlines()
        places = {int(line.split()[0], 16): place for place, line in enumerate(lines)}
        loops = []
        for end, line in enumerate(lines):
            target = re.search(r"\bBRA\b.*?\b0x([0-9a-f]+)", line)
            begin = places.get(int(target[1], 16), end) if target else end
            if begin < end and not any(begin <= first for first, _ in loops):
                loops.append((begin, end))
        begin, end = max(loops, key=lambda loop: loop[1] - loop[0])
        return dataclasses.replace(self, sass="\n".join(lines[begin : end + 1]))

    def count(self, opcode: str) -> int:
        """Instructions whose name begins with `opcode`, such as "LDG" or "HMMA.16816"."""
        pattern = rf"^\w+ (?:@!?U?P\w+ )?{re.escape(opcode)}"
        return len(re.findall(pattern, self.sass, re.MULTILINE))


def compiled(requests: Sequence[Request]) -> list[Compiled]:
    """Compile kernels without a GPU, all in one other process.

    Raises:
        AssertionError: the compiler failed; with its output.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps([dataclasses.asdict(request) for request in requests]),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return [Compiled(**found) for found in json.loads(ran.stdout.splitlines()[-1])]


def _compile(request: Request) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(request.module), request.kernel)
    names = kernel.arg_names
    unknown = {*request.signature, *request.constants} ^ set(names)
    assert not unknown, f"{request.kernel}: {sorted(unknown)} have no type, or are no arguments"
    aligned = [
        name
        for name, kind in request.signature.items()
        if name not in request.unaligned and (kind.startswith("*") or kind in ("i32", "i64"))
    ]
    source = ASTSource(
        kernel,
        {name: request.signature.get(name, "constexpr") for name in names},
        dict(request.constants),
        {(names.index(name),): [["tt.divisibility", _ALIGNED]] for name in aligned},
    )
    target = GPUTarget("cuda", request.capability, 32)
    binary = triton.compile(source, target, dict(request.options))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(binary.asm["cubin"])
        usage, sass = (_dumped(file, option) for option in ("-res-usage", "-sass"))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return Compiled(
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        shared_bytes=binary.metadata.shared,
        ttgir=binary.asm["ttgir"],
        ptx=binary.asm["ptx"],
        sass="\n".join(" ".join(line) for line in _INSTRUCTION.findall(sass)),
        arguments=[name for name in names if name in request.signature],
    )


def _dumped(file: Path, option: str) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run(
        [program, option, file], capture_output=True, text=True, check=True
    ).stdout


if __name__ == "__main__":
    # the cache keys kernels by source and options: it makes tests that run again fast
    requests = [Request(**request) for request in json.load(sys.stdin)]
    print(json.dumps([dataclasses.asdict(_compile(request)) for request in requests]))
