"""How tests start processes that they interrupt."""

import signal


def heed_ctrl_c() -> None:
    """For `preexec_fn`: a suite that runs in the background of a shell ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
