"""What processes of one command tell each other: results of the first one, and how all end.

They talk through the store of their group, which `polybasic.chain.base.processes.group` opens.
Nothing here imports torch: a process that is alone tells nobody.
"""

import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from math import inf
from typing import Any, NoReturn, TextIO, TypeVar

from polybasic.chain.base.processes.place import Place
from polybasic.chain.base.terminal import say

_Content = TypeVar("_Content")

_POLL_SECONDS = 0.05
_WATCH_SECONDS = 0.2
_KNOWN_SECONDS = 5.0  # that a process waits for the others to know the end, at most
_LOST = "failed: the first process has ended without a word; see what ended it"
_ENDING, _SHOWN = "polybasic/ending", "polybasic/shown"
_KNOWN, _LEFT = "polybasic/known", "polybasic/left"


class Coordinator:
    """The processes of a group, as one of them sees them.

    Args:
        store: of the group, one of torch.distributed's.
        place: of this process.
    """

    def __init__(self, store: Any, place: Place) -> None:
        self._store, self._place = store, place
        self._num_broadcasts = 0
        self._is_ending, self._lock = False, threading.Lock()
        self._over, self._watcher = threading.Event(), threading.Thread()

    def broadcast_from_first(self, produce: Callable[[], _Content]) -> _Content:
        """See the function of this name."""
        self._num_broadcasts += 1
        key = f"polybasic/broadcast/{self._num_broadcasts}"
        if self._place.is_first:
            content = produce()
            self._store.set(key, json.dumps(content))
            return content
        while not self._store.check([key]):
            time.sleep(_POLL_SECONDS)
        found: _Content = json.loads(self._store.get(key))
        return found

    def wait_for_all(self) -> None:
        """See the function of this name."""
        self._num_broadcasts += 1
        self._count(f"polybasic/broadcast/{self._num_broadcasts}", self._place.world_size)

    def watch(self) -> None:
        """From now on, end this process when another one says how all end."""
        watched = (self._store.clone(),)
        self._watcher = threading.Thread(target=self._watch, args=watched, daemon=True)
        self._watcher.start()

    def end(self, code: int, text: str) -> int:
        """See `end_all`."""
        try:
            if code == 0:
                self.wait_for_all()
                self._is_ending = True
                self._leave(self._store)
                return 0
            own = json.dumps({"rank": self._place.rank, "code": code, "text": text})
            said = self._store.compare_set(_ENDING, "", own).decode()
            self._obey(self._store, said)
            return int(json.loads(said)["code"])
        except RuntimeError:  # of a store that ended with its process
            show(text or _LOST)
            return code or 1
        finally:
            # the interpreter must not end while another thread is in the store: Python would end
            # that thread inside of C++, which aborts the process
            self._over.set()
            if self._watcher.is_alive():
                self._watcher.join(_KNOWN_SECONDS)

    def _obey(self, store: Any, said: str) -> None:
        """Say what ends all, in the first process, and wait until who must know it does."""
        with self._lock:
            if self._is_ending:
                self._over.wait()  # another thread is about to end this process
                return
            self._is_ending = True
        ending, place = json.loads(said), self._place
        if place.is_first:
            show(ending["text"])
            store.set(_SHOWN, "")
            store.add(_KNOWN, 1)
        elif place.rank == ending["rank"]:
            # when one process has ended, a launcher may end the others
            self._count(_KNOWN, place.world_size, _KNOWN_SECONDS, store)
            if not store.check([_SHOWN]):
                show(ending["text"])
        else:
            store.add(_KNOWN, 1)
        self._leave(store)

    def _leave(self, store: Any) -> None:
        """Be the last one if this is the first process, which may hold the store."""
        if self._place.is_first:
            self._count(_LEFT, self._place.world_size, _KNOWN_SECONDS, store)
        else:
            store.add(_LEFT, 1)

    def _count(self, key: str, wanted: int, seconds: float = inf, store: Any = None) -> None:
        """Count, and wait until all processes have; the store's own wait would hold up signals."""
        store, deadline = store or self._store, time.monotonic() + seconds
        count = store.add(key, 1)
        while count < wanted and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            count = store.add(key, 0)

    def _watch(self, store: Any) -> None:
        while not self._over.wait(_WATCH_SECONDS):
            try:
                if not store.check([_ENDING]):
                    continue
                said = store.get(_ENDING).decode()
            except RuntimeError:
                if self._is_ending or self._over.is_set():
                    return
                show(_LOST)
                _exit_at_once(1)
            with suppress(RuntimeError):
                self._obey(store, said)
            if self._over.is_set():
                return
            _exit_at_once(json.loads(said)["code"])


def _exit_at_once(code: int) -> NoReturn:
    """End whatever the other threads are at: they may wait for a process that is gone."""
    sys.stdout.flush()
    os._exit(code)


class _Silence(io.TextIOBase):
    """Drops what is written.

    Attributes:
        stream: in whose place it stands.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return len(text)


@contextmanager
def silent_unless_first(place: Place) -> Iterator[None]:
    """Let the first process alone write to stdout and stderr, as far as Python writes."""
    if place.is_first:
        yield
        return
    with redirect_stdout(_Silence(sys.stdout)), redirect_stderr(_Silence(sys.stderr)):
        yield


def show(text: str) -> None:
    """Print for people, also from a process that is silent otherwise."""
    if text:
        stream = sys.stderr.stream if isinstance(sys.stderr, _Silence) else sys.stderr
        say(text, stream)


_coordinator: Coordinator | None = None


def set_coordinator(coordinator: Coordinator | None) -> None:
    """Make a group that of this process; None: it is alone."""
    global _coordinator
    _coordinator = coordinator


def is_of_a_lost_process(error: BaseException) -> bool:
    """Whether gloo says by it that another process is gone."""
    return "gloo" in str(error) and "by peer" in str(error)


def has_coordinator() -> bool:
    """Whether this process has a group of several."""
    return _coordinator is not None


def watch() -> None:
    """From now on, end this process when another one of its group says how all end."""
    if _coordinator is not None:
        _coordinator.watch()


def broadcast_from_first(produce: Callable[[], _Content]) -> _Content:
    """What the first process produces, in all: the others wait for it, however long it takes.

    All processes call this equally often, in the same order.

    Args:
        produce: JSON content; called in the first process alone.
    """
    return produce() if _coordinator is None else _coordinator.broadcast_from_first(produce)


def wait_for_first() -> None:
    """Return when the first process has come here; called by all, as `broadcast_from_first`."""
    broadcast_from_first(lambda: None)


def wait_for_all() -> None:
    """Return when all processes have come here, however long that takes; called by all, as
    `broadcast_from_first`. For short waits see
    `polybasic.chain.base.processes.group.wait_for_all`."""
    if _coordinator is not None:
        _coordinator.wait_for_all()


def end_all(code: int, text: str = "") -> int:
    """End a command; the first process that says so decides for all, and one line is printed.

    Args:
        code: the exit code. 0 waits for the others, which may still fail.
        text: for people; nothing is printed where it is empty.

    Returns:
        The exit code of all.
    """
    if _coordinator is not None:
        return _coordinator.end(code, text)
    show(text)
    return code
