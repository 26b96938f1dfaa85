"""Compilers that are scripts, for tests of how kernels are compiled and found."""

from pathlib import Path

import torch

# something that can be loaded, for compilers that compile nothing
LOADABLE = Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so"
COPIES = f'for path; do :; done\ncp "{LOADABLE}" "$path"'
FAILS = 'echo "kernels.cpp: In function:"\necho "kernels.cpp:3:5: error: boom" >&2\nexit 1'
FORTY_TWO = '#include "part.h"\nextern "C" int answer() { return kAnswer; }\n'


def fake_compiler(path: Path, body: str = COPIES, version: str = "fake (Test 1.0) 1.2.3") -> Path:
    """A script that prints its version, logs its linking next to itself and runs `body`."""
    path.write_text(
        "#!/bin/sh\nPATH=/usr/bin:/bin\n"
        f'case " $* " in *" --version "*) echo "{version}"; exit 0;; esac\n'
        f'case " $* " in *" -shared "*) echo linked >> "$0.count";; esac\n'
        f'echo "$*" >> "$0.calls"\n{body}\n'
    )
    path.chmod(0o755)
    return path


def num_compiled(compiler: Path) -> int:
    """Libraries that a fake compiler has made or tried to link."""
    count = compiler.with_name(f"{compiler.name}.count")
    return len(count.read_text().splitlines()) if count.exists() else 0


def calls_of(compiler: Path) -> list[str]:
    """The arguments of each call but those for the version."""
    calls = compiler.with_name(f"{compiler.name}.calls")
    return calls.read_text().splitlines() if calls.exists() else []


def cached(tmp_path: Path) -> list[str]:
    """Names in the cache folder."""
    return sorted(path.name for path in (tmp_path / "cache" / "kernels").iterdir())
