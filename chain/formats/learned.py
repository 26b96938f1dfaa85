"""What a chain's head has learned from answers: a folder beside the chain, which stays as it is.

`CHAIN.learned` holds a head (config.json, model.safetensors) and learned.json. A chain with such a
folder beside it is loaded with that head; a head only drafts, so its answers stay the same.
"""

import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import Field, ValidationError

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.settings import Factor, Settings, Whole
from polybasic.chain.formats.files import disk_errors, read_json, whole_folder, write_json
from polybasic.chain.formats.manifest import Manifest, Sha256

_NAME = "learned.json"


class Learned(Settings):
    """Where a learned head comes from, and what it has learned from."""

    member: str = Field(description="of the chain, whose place it takes")
    files: dict[str, Sha256] = Field(description="that member's, from which it started")
    num_answers: Whole = Field(description="that it has learned from")
    num_tokens: Whole = Field(description="of these, each time counted that it has read one")
    num_steps: Whole = Field(description="of the optimizer")
    tokens_a_round: tuple[Factor, Factor] = Field(
        description="expected of greedy drafts, over answers not yet learned from: of the head "
        "that served before the latest change, and of this one"
    )

    def fits(self, manifest: Manifest) -> bool:
        """Whether a chain still has the head that this one started from."""
        return any(
            (member.name, member.files) == (self.member, self.files) for member in manifest.members
        )


def learned_folder(chain: Path) -> Path:
    """Where a chain's head is kept that has learned."""
    chain = chain.absolute()
    return chain.with_name(f"{chain.name}.learned")


def read_learned(chain: Path) -> Learned | None:
    """What the head beside a chain has learned; None if there is none.

    Raises:
        UserError: a missing or malformed record.
    """
    if not learned_folder(chain).exists():
        return None
    path = learned_folder(chain) / _NAME
    try:
        return Learned.model_validate(read_json(path, "record of a learned head"))
    except ValidationError as error:
        fault = error.errors()[0]
        raise UserError(
            "malformed record of a learned head",
            f"{path} {'.'.join(map(str, fault['loc']))}: {fault['msg']}",
            f"remove it: {undone_by(chain)}",
        ) from error


@contextmanager
def writing_learned(chain: Path, learned: Learned) -> Iterator[Path]:
    """Yield a folder for the head's own files; at the end it takes the place of what a chain has
    learned so far.

    Raises:
        UserError: the disk is full or not writable.
    """
    with whole_folder(learned_folder(chain)) as partial:
        yield partial
        write_json(partial / _NAME, learned.model_dump(mode="json"))


def forget_learned(chain: Path) -> None:
    """Remove it.

    Raises:
        UserError: the disk does not allow it.
    """
    folder = learned_folder(chain)
    with disk_errors(folder):
        shutil.rmtree(folder)


def undone_by(chain: Path) -> str:
    """The command that undoes it."""
    return f"polybasic forget {shlex.quote(str(chain))}"
