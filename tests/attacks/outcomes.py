"""What may come of an attack: success, or one line that says what is wrong."""

from collections.abc import Callable

from polybasic.chain.base.errors import UserError
from tests.recipes.command_line import call


def of_call(attack: Callable[[], object]) -> str | None:
    """The line with which Python code was refused; None where it succeeded.

    Raises:
        AssertionError: a refusal that is not one printable line.
        Exception: whatever else the code raised.
    """
    try:
        attack()
    except UserError as error:
        return _one_line(str(error))
    return None


def of_command(*arguments: object) -> str | None:
    """The same of `polybasic ARGUMENTS`, in this process.

    Raises:
        AssertionError: another exit code than 0 and 2, or a refusal that is not one printable line.
    """
    code, out, err = call(*arguments)
    assert code in (0, 2), f"exit code {code}: {err[-2000:]}"
    assert "Traceback" not in err
    assert _is_shown_safely(out + err)
    if code == 0:
        return None
    *before, line = err.strip().splitlines()
    assert line.startswith(("error: ", "Error: ")) or before[:1] == ["Usage:"], err
    return _one_line(line.removeprefix("error: "))


def _one_line(line: str) -> str:
    assert line
    assert "\n" not in line
    assert _is_shown_safely(line), ascii(line)
    return line


def _is_shown_safely(text: str) -> bool:
    """Whether a terminal shows it and does nothing else."""
    return all(character.isprintable() or character in "\n\t" for character in text)
