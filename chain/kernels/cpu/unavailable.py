"""What says that the native kernels cannot be had."""


class NativeUnavailable(Exception):
    """The native kernels cannot be used here.

    Args:
        reason: why, in one line.
        do: how to make them usable.
    """

    def __init__(self, reason: str, do: str) -> None:
        self.reason, self.do = reason, do
        super().__init__(" ".join(f"{reason}; {do}".split()))
