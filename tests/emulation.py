"""Tests run again in a process whose PyTorch sees no more than AVX2."""

import os
import subprocess
import sys

_WITHOUT_AVX512 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


def assert_passes_without_avx512(file: str, options: list[str], outcome: str) -> None:
    """Run a file's tests by pytest where bfloat16 is slow.

    Args:
        file: of tests.
        options: further arguments of pytest.
        outcome: what its last line must say, "3 passed".
    """
    code = (
        "import sys, pytest, torch; "
        "from polybasic.chain.kernels.product_times import multiplies_fast; "
        "assert not multiplies_fast(torch.bfloat16); sys.exit(pytest.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, file, "-p", "no:cacheprovider", *options],
        env=os.environ | _WITHOUT_AVX512,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert outcome in done.stdout
