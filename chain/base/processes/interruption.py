"""Signals that end work: it saves first where it can, at the end of a step, else ends at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Of people, of schedulers that take the machine away, and of Slurm before a job's time is over."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the work; the message says in one line how to go on.

    Args:
        signal_number: one of `HANDLED_SIGNALS`.
        message: for people.
        is_saved: whether a checkpoint was written for it.
    """

    def __init__(self, signal_number: int, message: str, is_saved: bool = False) -> None:
        self.signal_number, self.message, self.is_saved = signal_number, message, is_saved
        super().__init__(f"{signal.Signals(signal_number).name}: {message}")

    @property
    def exit_code(self) -> int:
        """As a shell counts it: 130 for SIGINT, 143 for SIGTERM, 138 for SIGUSR1."""
        return 128 + self.signal_number


class ReceivedSignal:
    """The number of the last signal that arrived; 0 as long as none did."""

    number = 0


def end_at_once(number: int, frame: FrameType | None) -> None:
    """Handle a signal during work that can end anywhere.

    Raises:
        Interrupted: always.
    """
    raise Interrupted(number, "what was whole is kept; the same command goes on from there")


@contextmanager
def signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGUSR1 end the work as Ctrl-C does, so that what is half written is removed.

    In a thread other than the main one signals are left to the program.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [each for each in HANDLED_SIGNALS if each != signal.SIGINT]
    before = [signal.signal(number, end_at_once) for number in handled]
    try:
        yield
    finally:
        for number, handler in zip(handled, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def record_signals(second_ends_at_once: bool) -> Iterator[ReceivedSignal]:
    """Remember the signals instead of ending at once.

    What the process ignores stays ignored (a shell starts background jobs so). In a thread other
    than the main one signals are left to the program.

    Args:
        second_ends_at_once: whether a second signal has its usual effect. False in a process that a
            launcher started: it may get the same signal twice, once from the launcher.
    """
    received = ReceivedSignal()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {
        number: handler
        for number in HANDLED_SIGNALS
        if (handler := signal.getsignal(number)) is not signal.SIG_IGN
    }

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def remember(number: int, frame: FrameType | None) -> None:
        received.number = number
        if second_ends_at_once:
            restore()

    for number in before:
        signal.signal(number, remember)
    try:
        yield received
    finally:
        restore()
