"""The exceptions that a user is meant to read."""

from polybasic.chain.base.terminal import escaped


class UserError(Exception):
    """Bad input, reported in one line of three parts; the command line prints it and exits with 2.

    Args:
        what: what is wrong ("unknown key").
        where: the place with its value ("train.lerning_rate in recipes/base.yaml").
        do: what to do about it ("did you mean train.learning_rate?").
    """

    def __init__(self, what: str, where: str, do: str) -> None:
        self.what, self.where, self.do = what, where, do
        super().__init__(escaped(" ".join(f"{what}: {where}; {do}".split())))


class LostProcessError(Exception):
    """Another process, without which this one cannot go on, has ended or does not answer.

    The command line prints it in one line and exits with 1.
    """
