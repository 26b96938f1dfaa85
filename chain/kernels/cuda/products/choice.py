"""Which kernel computes a product: measured once on each GPU, then remembered.

A product can be divided in several ways, and a dense one can be left to PyTorch. Options are
compiled in threads, those of all products that are known together. Each is checked against float32,
then timed over weights that exceed the GPU's cache, in a CUDA graph as in real use. The results are
kept in the user's cache folder for later processes.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from polybasic.chain.base.caching import cache_folder, read_cached, write_cached
from polybasic.chain.base.processor import num_cores
from polybasic.chain.formats.files import sha256_of_file, sha256_of_object
from polybasic.chain.kernels.cuda.products.launch import Product, Tiling, can_begin_early
from polybasic.chain.kernels.cuda.products.options import (
    Option,
    Task,
    described,
    fixed_option,
    num_processors,
    options_of,
)
from polybasic.chain.kernels.cuda.products.samples import relative_error, samples_of
from polybasic.chain.kernels.cuda.products.timing import interleaved_seconds

Timer = Callable[[Sequence[Callable[[], object]]], list[float]]
"""Seconds of one call of each function."""

TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Relative errors (Euclidean norm) from which a result is wrong; rounding causes a tenth."""

_SOURCES = "kernels.py", "launch.py", "options.py", "timing.py", "unpacking.py"
_COMPILERS = 8
_UNFUSED, _EARLY = 2, 1

_log = logging.getLogger(__name__)


class Contest:
    """The comparison of ways to compute one product: in stages, for what wins enters the next.

    First all tilings with the norm fused, and PyTorch's operations for a dense weight; then the
    best without; then the best of all beginning early.

    Args:
        product: shapes, dtypes and device; all numbers are replaced by random ones.
        options: to compare.
        begins_early: whether launches may begin before the previous kernel has ended.
    """

    NUM_STAGES = 3

    def __init__(
        self, product: Product, options: Sequence[Tiling], timer: Timer, begins_early: bool
    ) -> None:
        self.product, self.task = product, Task.of(product)
        self._options, self._timer, self._begins_early = options, timer, begins_early
        self._seconds: dict[Option, float] = {}

    def entrants(self, stage: int) -> list[Tiling]:
        """What is compared in a stage, after the stages before it."""
        if stage == 0:
            return list(self._options)
        if stage == 1:
            best = self._best(_UNFUSED if self.product.can_fuse else 0)
            return [replace(tiling, is_fused=False) for tiling in best]
        best = self._best(_EARLY if self._begins_early else 0)
        return [replace(tiling, is_early=True) for tiling in best]

    def compare(self, stage: int) -> None:
        """Time what is right of a stage's entrants, which are compiled; warns of the others."""
        entrants, others = self.entrants(stage), list[Option]()
        if stage == 0 and isinstance(self.product.linear.weight, Tensor):
            others.append(None)
        if not entrants and not others:
            return
        samples = samples_of(self.product)
        right = [tiling for tiling in entrants if _is_right(samples[0], tiling, self.task)]
        self._seconds |= _timed(samples, [*right, *others], self._timer, self.task)

    def result(self) -> tuple[Option, dict[str, float]]:
        """The fastest option, and microseconds by option; PyTorch's if none is left."""
        seconds = self._seconds
        if not seconds:
            _log.warning("no kernel computes %s: PyTorch's operations do, more slowly", self.task)
            return None, {}
        microseconds = {described(option): 1e6 * found for option, found in seconds.items()}
        return min(seconds, key=lambda option: seconds[option]), microseconds

    def _best(self, num: int) -> list[Tiling]:
        tilings = [option for option in self._seconds if option is not None]
        return sorted(tilings, key=lambda option: self._seconds[option])[:num]


def decide(contests: Sequence[Contest]) -> None:
    """Run contests side by side: the kernels of a stage of all of them are compiled together."""
    for stage in range(Contest.NUM_STAGES):
        compile_together(
            [
                (contest.product, option)
                for contest in contests
                for option in contest.entrants(stage)
            ]
        )
        for contest in contests:
            contest.compare(stage)


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
        if str(task) not in self._chosen:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return fixed_option(product)
            self.prepare([product])
        tiling = self._chosen[str(task)]["tiling"]
        self._options[task] = None if tiling is None else Tiling(**tiling)
        return self._options[task]

    @property
    def microseconds(self) -> dict[str, dict[str, float]]:
        """Microseconds of all options that were compared, by task."""
        return {name: found["microseconds"] for name, found in self._chosen.items()}

    def prepare(self, products: Sequence[Product]) -> None:
        """Measure what was not measured before, all together."""
        missing = {Task.of(product): product for product in products}
        missing = {
            task: product for task, product in missing.items() if str(task) not in self._chosen
        }
        if not missing:
            return
        if not self._has_announced:
            self._has_announced = True
            print(
                f"choosing kernels on {_card(self.device)}, once on this machine", file=sys.stderr
            )
        processors, early = num_processors(self.device), can_begin_early(self.device)
        contests = [
            Contest(product, options_of(task, processors), self.timer, early)
            for task, product in missing.items()
        ]
        # streams and events, by which options are timed, are those of the current device
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            decide(contests)
        for contest in contests:
            option, microseconds = contest.result()
            _log.debug("%s: %s of %s", contest.task, described(option), microseconds)
            tiling = None if option is None else asdict(option)
            self._chosen[str(contest.task)] = {"tiling": tiling, "microseconds": microseconds}
        if self.file is not None:
            self._chosen = _read(self.file) | self._chosen
            write_cached(self.file, self._chosen, "kernels are chosen again by each process")


@cache
def choices_of(device: torch.device) -> Choices:
    """The choices for a GPU, with those of earlier processes; one shared object."""
    try:
        folder = cache_folder()
    except RuntimeError:  # there is no home folder
        return Choices(device, None)
    return Choices(device, folder / "products" / f"{_digest(device)}.json")


def compile_together(wanted: Sequence[tuple[Product, Tiling]]) -> None:
    """Compile in threads, as most time is spent outside of Python. Errors are raised later.

    Products of many shapes share a kernel, which is compiled once.
    """
    if not wanted or wanted[0][0].x_RI.device.type != "cuda":
        return
    by_key = {product.kernel_key(option): (product, option) for product, option in wanted}
    kernels = list(by_key.values())

    def compile_one(pair: tuple[Product, Tiling]) -> None:
        product, option = pair
        try:
            with torch.inference_mode(), torch.cuda.device(product.x_RI.device):
                product.compile(option)
        except Exception as error:
            _log.debug("%s: %s", described(option), error)

    # the first one alone, which creates what all share
    compile_one(kernels[0])
    with ThreadPoolExecutor(min(_COMPILERS, num_cores())) as pool:
        list(pool.map(compile_one, kernels[1:]))


def _is_right(product: Product, option: Option, task: Task) -> bool:
    """Whether an option computes a product correctly; warns if not."""
    try:
        error = relative_error(product, product.computed(option))
    except Exception as failure:
        _warn(task, option, failure)
        return False
    if not error < TOLERANCES[product.x_RI.dtype]:
        _log.warning("%s: kernel %s is wrong by %.2g", task, described(option), error)
        return False
    return True


def _timed(
    samples: Sequence[Product], options: Sequence[Option], timer: Timer, task: Task
) -> dict[Option, float]:
    """Seconds of one product by each option that can be captured; warns of the others."""

    def timed(chosen: Sequence[Option]) -> dict[Option, float]:
        runs = [partial(_compute_all, samples, option) for option in chosen]
        found = timer(runs)
        return {option: each / len(samples) for option, each in zip(chosen, found, strict=True)}

    with suppress(Exception):
        return timed(options)
    # each by itself, as it is not known which of them failed
    seconds: dict[Option, float] = {}
    for option in options:
        try:
            seconds |= timed([option])
        except Exception as failure:
            _warn(task, option, failure)
    return seconds


def _compute_all(samples: Sequence[Product], option: Option) -> None:
    for sample in samples:
        sample.computed(option)


def _warn(task: Task, option: Option, failure: Exception) -> None:
    reason = str(failure).strip().partition("\n")[0]
    _log.warning("%s: kernel %s fails: %s", task, described(option), reason)


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
