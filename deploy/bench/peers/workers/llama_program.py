"""A program of llama.cpp, as llama-cpp-python installs it: python -m workers.llama_program NAME ...

It becomes that program. $LLAMA_CPP_LIB_PATH names a folder with other libraries than the package's,
as that package has it.
"""

import os
import sys
import sysconfig
from pathlib import Path


def main() -> None:
    name, *words = sys.argv[1:]
    installed = Path(sysconfig.get_path("platlib"))
    program = installed / "bin" / name
    if not program.exists():
        sys.exit(
            f"llama-cpp-python was built without {name}: pip cache remove llama_cpp_python, "
            "and install it again"
        )
    own = os.environ.get("LLAMA_CPP_LIB_PATH", str(installed / "llama_cpp" / "lib"))
    folders = {"LD_LIBRARY_PATH": f"{own}:{installed / 'lib'}"}
    os.execve(program, [str(program), *words], {**os.environ, **folders})


if __name__ == "__main__":
    main()
