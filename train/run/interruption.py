"""How a run reacts to SIGINT and SIGTERM: it saves at the next step boundary, then ends."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal ended the work; the message says in one line how to go on.

    Args:
        signal_number: SIGINT or SIGTERM.
        message: for people.
        is_saved: whether a checkpoint was written for it.
    """

    def __init__(self, signal_number: int, message: str, is_saved: bool = False) -> None:
        self.signal_number, self.message, self.is_saved = signal_number, message, is_saved
        super().__init__(f"{signal.Signals(signal_number).name}: {message}")

    @property
    def exit_code(self) -> int:
        """As a shell counts it: 130 for SIGINT, 143 for SIGTERM."""
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
def sigterm_raises() -> Iterator[None]:
    """Let SIGTERM end the work as Ctrl-C does, so that what is half written is removed.

    In a thread other than the main one signals are left to the program.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def record_signals(second_ends_at_once: bool) -> Iterator[ReceivedSignal]:
    """Remember SIGINT and SIGTERM instead of ending at once.

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
