"""CUDA graphs, emulated on a CPU.

A capture records every operation that reaches PyTorch's dispatcher, and every kernel that Triton's
interpreter is asked to run, with the very tensors that it read and wrote; a replay runs these again
over the same tensors. What a real graph bakes in is therefore baked in here: numbers that Python
computed, tensors of an earlier call, branches that were taken. What a real capture refuses raises.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from polybasic.chain.kernels.cuda.graphs import MAX_GRAPHS, CapturedGraph, Graphs, Step
from tests.deploy.capture_rules import RefusingHostData, refuse_operation

aten = torch.ops.aten

_EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
_INTERPRETER = "triton.runtime.interpreter"
NUM_CHECKED = 3
"""Replays of a graph that are compared; what other requests leave shows in answers."""


class RecordedGraphs(Graphs):
    """Graphs on a CPU that behave as CUDA's.

    Args:
        enabled, max_graphs: as for `Graphs`.
        checked: the first replays of each graph are compared with its function, run from the same
            state, so that an AssertionError names the first graph that does something else.
    """

    def __init__(
        self, enabled: bool = True, max_graphs: int = MAX_GRAPHS, checked: bool = False
    ) -> None:
        super().__init__(torch.device("cpu"), enabled, max_graphs)
        self.checked = checked
        self._num_checked: Counter[Any] = Counter()
        self._is_busy = False

    @property
    def is_active(self) -> bool:
        return self.enabled

    @property
    def num_bytes(self) -> int:
        recordings = [captured for captured, _ in self._kept.values()]
        return sum(
            recording.num_bytes for recording in recordings if isinstance(recording, _Recording)
        )

    def run(self, key: Any, function: Step, label: str | None = None) -> None:
        assert not self._is_busy, f"{key}: run by the function of another graph"
        self._is_busy = True
        try:
            called = self._called(key, label or key, function)
            super().run(key, function, label)
        finally:
            self._is_busy = False
        for storage, by_call in called:
            is_same = torch.equal(_bytes_of(storage), _bytes_of(by_call))
            assert is_same, f"{label or key}: a replay writes other numbers than the function"

    def _warm_up(self, function: Step) -> None:
        function()

    def _capture(self, function: Step) -> CapturedGraph:
        recording = _Recording()
        with RefusingHostData(), _recorded(recording):
            function()
        # Nothing runs while a stream is captured: what was written is as before, and what was
        # made holds whatever was in its memory.
        recording.written.restore()
        for made in recording.made:
            _spoil(made)
        return recording

    def _called(
        self, key: Any, name: object, function: Step
    ) -> list[tuple[UntypedStorage, UntypedStorage]]:
        """What a checked replay writes, and what its function does; all is left as it was."""
        if not self.checked or key not in self._kept or self._num_checked[key] == NUM_CHECKED:
            return []
        self._num_checked[key] += 1
        recording = self._kept[key][0]
        assert isinstance(recording, _Recording)
        state = _Saved()
        for storage in recording.written.storages():
            state.save(storage)
        fresh = _Recording()
        with torch.inference_mode(), _recorded(fresh):
            function()
        called = [(storage, storage.clone()) for storage in state.storages()]
        missed = [storage for storage in fresh.written.storages() if not state.holds(storage)]
        fresh.written.restore()
        state.restore()
        assert not missed, f"{name}: a replay leaves {len(missed)} tensors that the function writes"
        return called


class _Saved:
    """Contents of storages as they were when each was saved first."""

    def __init__(self) -> None:
        self._saved: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}

    def save(self, storage: UntypedStorage) -> None:
        if not self.holds(storage):
            self._saved[storage._cdata] = storage, storage.clone()

    def holds(self, storage: UntypedStorage) -> bool:
        return storage._cdata in self._saved

    def storages(self) -> list[UntypedStorage]:
        return [storage for storage, _ in self._saved.values()]

    def restore(self) -> None:
        for storage, content in self._saved.values():
            storage.copy_(content)


@dataclass
class _Recording:
    """What one capture saw.

    Attributes:
        steps: what ran, to be run again in order.
        made: tensors that the function made.
        written: storages that it wrote and did not make, as they were before.
    """

    steps: list[Callable[[], None]] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)
    written: _Saved = field(default_factory=_Saved)
    _own: set[int] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self.made
        }
        return sum(storage.nbytes() for storage in storages.values())

    def replay(self) -> None:
        with torch.inference_mode():
            for step in self.steps:
                step()

    def add_made(self, made: Sequence[Tensor]) -> None:
        self.made += made
        self._own |= {_place(tensor) for tensor in made}

    def save_before(self, written: Sequence[Tensor]) -> None:
        for tensor in written:
            if _place(tensor) not in self._own:
                self.written.save(tensor.untyped_storage())


class _Recorder(TorchDispatchMode):
    """Records what reaches the dispatcher while it is entered."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Operations that are composed of others are seen by their parts.
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        refuse_operation(func, args)
        self.recording.save_before(list(_written(func, args, kwargs)))
        out = func(*args, **kwargs)
        read = {_place(tensor) for tensor in _tensors((args, kwargs))}
        outs = [tensor if _place(tensor) not in read else None for tensor in _tensors(out)]
        made = [tensor for tensor in outs if tensor is not None]
        self.recording.add_made(made)
        if func in _EMPTY:
            _spoil(made[0])
            self.recording.steps.append(lambda: _spoil(made[0]))
        elif made or func._schema.is_mutable:

            def step() -> None:
                for before, now in zip(outs, _tensors(func(*args, **kwargs)), strict=True):
                    if before is not None:
                        before.copy_(now)

            self.recording.steps.append(step)
        return out


@contextmanager
def _recorded(recording: _Recording) -> Iterator[None]:
    with _Recorder(recording), _recorded_kernels(recording):
        yield


@contextmanager
def _recorded_kernels(recording: _Recording) -> Iterator[None]:
    """Record launches in Triton's interpreter, where it is in use."""
    if _INTERPRETER not in sys.modules:
        yield
        return
    executor = sys.modules[_INTERPRETER].GridExecutor
    launch = executor.__call__

    def record(self: Any, *args: Any, **kwargs: Any) -> None:
        # It is not known which of its tensors a kernel writes.
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            recording.save_before(_tensors((args, kwargs)))
            launch(self, *args, **kwargs)
        recording.steps.append(lambda: launch(self, *args, **kwargs))

    executor.__call__ = record
    try:
        yield
    finally:
        executor.__call__ = launch


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Tensors that an operation writes in place."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from _tensors(given)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _spoil(tensor: Tensor) -> None:
    """Fill with what nothing right can come from, as memory may hold that others used."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
