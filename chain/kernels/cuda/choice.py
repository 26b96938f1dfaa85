"""Which kernel computes a product: measured once on each GPU, then remembered.

A product can be divided in several ways, and a dense one can be left to PyTorch. Each option is
first checked against float32, then timed over weights that exceed the GPU's cache, in a CUDA graph
as in real use. The results are kept in the user's cache folder for later processes.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from polybasic.chain.formats.files import sha256_of_file, sha256_of_object
from polybasic.chain.kernels.caching import read_cached, write_cached
from polybasic.chain.kernels.cuda.product_launch import Product, Tiling, can_begin_early
from polybasic.chain.kernels.cuda.product_options import (
    Option,
    Task,
    described,
    fixed_option,
    num_processors,
    options_of,
)
from polybasic.chain.kernels.cuda.product_samples import relative_error, samples_of
from polybasic.chain.kernels.cuda.product_timing import interleaved_seconds
from polybasic.chain.kernels.environment import cache_folder
from polybasic.chain.kernels.torch.packed_weight import PackedWeight

Timer = Callable[[Sequence[Callable[[], object]]], list[float]]
"""Seconds of one call of each function."""

TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Relative errors (Euclidean norm) from which a result is wrong; rounding causes a tenth."""

_SOURCES = ("product_kernels.py", "product_launch.py", "product_options.py", "product_timing.py")
_COMPILERS = 8
_UNFUSED, _EARLY = 2, 1

_log = logging.getLogger(__name__)


def choose(
    product: Product,
    options: Sequence[Tiling],
    timer: Timer = interleaved_seconds,
    begins_early: bool = False,
) -> tuple[Option, dict[str, float]]:
    """The fastest of the correct options, and microseconds by option.

    Options that fail or are wrong are dropped with a warning. If none is left, PyTorch's operations
    are used, which dequantize a packed weight in each product.

    Args:
        product: shapes, dtypes and device; all numbers are replaced by random ones.
        options: to compare, with the norm fused; the best are also compared without.
        begins_early: compare the best also with launches that begin before the previous kernel
            has ended.
    """
    samples = samples_of(product)
    task = Task.of(product)
    seconds: dict[Option, float] = {}

    def compare(tilings: Sequence[Tiling], others: Sequence[Option] = ()) -> None:
        _compile_all(samples[0], tilings)
        right = [tiling for tiling in tilings if _is_right(samples[0], tiling, task)]
        seconds.update(_timed(samples, [*right, *others], timer))

    def best(num: int) -> list[Tiling]:
        tilings = [option for option in seconds if option is not None]
        return sorted(tilings, key=lambda option: seconds[option])[:num]

    compare(options, () if isinstance(product.linear.weight, PackedWeight) else (None,))
    if product.can_fuse:
        compare([replace(tiling, is_fused=False) for tiling in best(_UNFUSED)])
    if begins_early:
        compare([replace(tiling, is_early=True) for tiling in best(_EARLY)])
    if not seconds:
        _log.warning("no kernel computes %s: PyTorch's operations do, more slowly", task)
        return None, {}
    microseconds = {described(option): 1e6 * found for option, found in seconds.items()}
    return min(seconds, key=lambda option: seconds[option]), microseconds


class Choices:
    """The choices for one GPU.

    Args:
        device: a GPU.
        file: stores choices for other processes; None keeps them in this process.
        timer: for tests.
    """

    def __init__(
        self, device: torch.device, file: Path | None, timer: Timer = interleaved_seconds
    ) -> None:
        self.device, self.file, self.timer = device, file, timer
        self._chosen: dict[str, dict[str, Any]] = {} if file is None else _read(file)
        self._options: dict[Task, Option] = {}
        self._has_announced = False

    def option_for(self, product: Product) -> Option:
        """The option that computes a product; measured now if it was not before.

        While a CUDA graph is captured nothing can be measured: the likeliest option is returned
        then, and not remembered.
        """
        task = Task.of(product)
        if task in self._options:
            return self._options[task]
        found = self._chosen.get(str(task))
        if found is None:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return fixed_option(product)
            found = self._measured(product, task)
        tiling = found["tiling"]
        self._options[task] = None if tiling is None else Tiling(**tiling)
        return self._options[task]

    @property
    def microseconds(self) -> dict[str, dict[str, float]]:
        """Microseconds of all options that were compared, by task."""
        return {name: found["microseconds"] for name, found in self._chosen.items()}

    def _measured(self, product: Product, task: Task) -> dict[str, Any]:
        if not self._has_announced:
            self._has_announced = True
            print(
                f"choosing kernels on {_card(self.device)}, once on this machine", file=sys.stderr
            )
        options = options_of(task, num_processors(self.device))
        option, microseconds = choose(product, options, self.timer, can_begin_early(self.device))
        _log.debug("%s: %s of %s", task, described(option), microseconds)
        tiling = None if option is None else asdict(option)
        found = {"tiling": tiling, "microseconds": microseconds}
        self._chosen[str(task)] = found
        if self.file is not None:
            self._chosen = _read(self.file) | self._chosen
            write_cached(self.file, self._chosen, "kernels are chosen again by each process")
        return found


@cache
def choices_of(device: torch.device) -> Choices:
    """The choices for a GPU, with those of earlier processes; one shared object."""
    try:
        folder = cache_folder()
    except RuntimeError:  # there is no home folder
        return Choices(device, None)
    return Choices(device, folder / "products" / f"{_digest(device)}.json")


def _compile_all(product: Product, options: Sequence[Tiling]) -> None:
    """Compile in threads, as most time is spent outside of Python. Errors are raised later."""
    if product.x_RI.device.type != "cuda" or not options:
        return

    def compile_one(option: Tiling) -> None:
        try:
            with torch.inference_mode(), torch.cuda.device(product.x_RI.device):
                product.compile(option)
        except Exception as error:
            _log.debug("%s: %s", described(option), error)

    # the first one alone, which creates what all share
    compile_one(options[0])
    with ThreadPoolExecutor(min(_COMPILERS, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, options[1:]))


def _is_right(product: Product, option: Option, task: Task) -> bool:
    """Whether an option computes a product correctly; warns if not."""
    try:
        error = relative_error(product, product.computed(option))
    except Exception as failure:
        reason = str(failure).strip().partition("\n")[0]
        _log.warning("%s: kernel %s fails: %s", task, described(option), reason)
        return False
    if not error < TOLERANCES[product.x_RI.dtype]:
        _log.warning("%s: kernel %s is wrong by %.2g", task, described(option), error)
        return False
    return True


def _timed(
    samples: Sequence[Product], options: Sequence[Option], timer: Timer
) -> dict[Option, float]:
    """Seconds of one product by each option."""

    def runs(option: Option) -> Callable[[], object]:
        return lambda: [sample.computed(option) for sample in samples]

    found = timer([runs(option) for option in options])
    return {option: each / len(samples) for option, each in zip(options, found, strict=True)}


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the interpreter"


def _digest(device: torch.device) -> str:
    folder = Path(__file__).parent
    return sha256_of_object(
        {
            "card": (_card(device), num_processors(device)),
            "versions": (torch.__version__, triton.__version__),
            "sources": {name: sha256_of_file(folder / name) for name in _SOURCES},
        }
    )


def _read(file: Path) -> dict[str, dict[str, Any]]:
    """Choices of earlier processes; none if the file is missing or not one of ours."""
    content = read_cached(file, "kernels are chosen again")
    try:
        return {
            str(name): {"tiling": found["tiling"], "microseconds": dict(found["microseconds"])}
            for name, found in ({} if content is None else content).items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        _log.warning("kernels are chosen again: %s holds something else (%s)", file, error)
        return {}
