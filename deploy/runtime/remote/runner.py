"""One thread that runs the passes of many sequences, together where they wait at the same time."""

import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from polybasic.deploy.runtime.rounds.passes import Pass, Passes, run_together

T = TypeVar("T")


@dataclass
class _Work:
    """Work that yields passes, and who waits for its result."""

    passes: Passes[Any]
    future: "Future[Any]"
    waiting: Pass | None = None

    def go_on(self, result: Any) -> bool:
        """Up to the next pass; False if there is none."""
        try:
            self.waiting = self.passes.send(result)
        except StopIteration as end:
            if self.future.set_running_or_notify_cancel():
                self.future.set_result(end.value)
            return False
        except Exception as error:
            self.fail(error)
            return False
        return True

    def fail(self, error: Exception) -> None:
        """End with an error."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class RemoteRunner:
    """Runs work until it is closed; results and errors come by futures, which may be cancelled."""

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._waiting: list[_Work] = []
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, work: Passes[T]) -> "Future[T]":
        """Run work after what was submitted before has begun."""
        future: Future[T] = Future()
        self._new.put(_Work(work, future))
        return future

    def close(self) -> None:
        """End after the pass that is under way; what waits is cancelled."""
        self._new.put(None)

    def _run(self) -> None:
        with torch.inference_mode():
            while self._take():
                self._step()
        for work in self._waiting:
            work.future.cancel()

    def _take(self) -> bool:
        """Begin what is new, and wait for it where nothing else is to do; False at the end."""
        while not self._waiting or not self._new.empty():
            new = self._new.get()
            if new is None:
                return False
            if new.go_on(None):
                self._waiting.append(new)
        return True

    def _step(self) -> None:
        """Run one pass, for all that wait for one of its kind."""
        waiting = [work for work in self._waiting if not work.future.cancelled()]
        chosen = [work for work in waiting if _kind(work) == _kind(waiting[0])]
        self._waiting = [work for work in waiting if work not in chosen]
        if not chosen:
            return
        try:
            results = run_together([work.waiting for work in chosen])
        except Exception as error:
            for work in chosen:
                work.fail(error)
            return
        for work, result in zip(chosen, results, strict=True):
            if work.go_on(result):
                self._waiting.append(work)


def _kind(work: _Work) -> Any:
    assert work.waiting is not None, "work that waits"
    return work.waiting.kind
