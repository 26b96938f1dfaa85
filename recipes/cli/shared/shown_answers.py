"""An answer on its way to stdout: as it is, or with the member that proposed each token."""

from itertools import cycle
from typing import TYPE_CHECKING

from polybasic.chain.base.terminal import escaped
from polybasic.recipes.cli.chain import answer_stream

if TYPE_CHECKING:
    from polybasic.deploy import Chain, Piece

_PROPOSER_LOOKS = ("cyan italic", "green", "magenta dim")


class ShownAnswer:
    """Prints an answer's pieces, and a line feed after the last one."""

    def __init__(self) -> None:
        self._has_begun = False

    def write(self, piece: "Piece") -> None:
        """Print a piece."""
        self._has_begun = True
        print(piece.text, end="", flush=True, file=answer_stream())

    def finish(self) -> None:
        """Print what is left."""
        if self._has_begun:
            print(file=answer_stream())


class TintedAnswer(ShownAnswer):
    """The same for a terminal, where each member's tokens have a look of their own.

    Tokens that the target drew itself are bold and underlined. A terminal without colours shows
    what is left of the looks.
    """

    def __init__(self, chain: "Chain") -> None:
        from polybasic.chain.base.console import Console
        from polybasic.deploy.serve.texts import SharedText

        super().__init__()
        self._shared, self._console = SharedText(chain.tokenizer.backend_tokenizer), Console()
        self._looks = _looks(chain)

    def write(self, piece: "Piece") -> None:
        """Print the tokens whose text is known with a piece."""
        self._has_begun = True
        for token in self._shared.add(piece.text, piece.token_ids, piece.members):
            self._print(token.text, token.member)

    def finish(self) -> None:
        """Print what is left."""
        for token in self._shared.finish():
            self._print(token.text, token.member)
        super().finish()

    def explain(self) -> None:
        """Print the names of all that propose, each in its look."""
        for number, member in enumerate(self._looks):
            self._print(f"{', ' if number else ''}", "")
            self._print(member, member)
        self._print("\n", "")

    def _print(self, text: str, member: str) -> None:
        look = self._looks.get(member, "")
        self._console.out(escaped(text), style=look, end="", highlight=False)


def _looks(chain: "Chain") -> dict[str, str]:
    target, *others = [member.name for member in chain.manifest.members]
    proposers = zip(others, cycle(_PROPOSER_LOOKS), strict=False)
    return {target: "bold underline", **dict(proposers), "ngram": "yellow"}
