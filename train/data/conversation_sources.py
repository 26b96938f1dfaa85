"""What a recipe's `data.conversations` names: a file here, a hub data set, or a file of one."""

import re
from dataclasses import dataclass
from pathlib import Path

from polybasic.chain.base.errors import UserError
from polybasic.train.data.conversation_files import FILE_NAME
from polybasic.train.data.shipped import SHIPPED_PATH
from polybasic.train.settings import SHIPPED

_HUB_SOURCE = re.compile(
    r"(?P<repository>[\w.-]+/[\w.-]+?)(@(?P<revision>[\w./-]+?))?(:(?P<path>[^:]+))?"
)


@dataclass(frozen=True)
class HubData:
    """A data set of the hub.

    Attributes:
        repository: `org/name`.
        revision: commit, tag or branch; None is the newest.
        path: of one file in it; None is its train split.
    """

    repository: str
    revision: str | None
    path: str | None

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{self.repository}{revision}" + ("" if self.path is None else f":{self.path}")


def parse_source(source: str) -> Path | HubData:
    """Distinguish files from hub data sets; what lies here under that name wins.

    Args:
        source: a path, `org/name[@revision][:path/of/file.json]`, or `SHIPPED`.

    Raises:
        UserError: neither of both.
    """
    if source == SHIPPED:
        return SHIPPED_PATH
    if Path(source).exists():
        return Path(source)
    found = _HUB_SOURCE.fullmatch(source)
    if found and (found["path"] is not None or not FILE_NAME.search(source)):
        if found["path"] is not None and not FILE_NAME.search(found["path"]):
            raise UserError(
                "not a conversation file",
                f"{found['path']} of data.conversations = {source}",
                "name a .json or .jsonl file, which may be compressed to .gz or .zst",
            )
        return HubData(found["repository"], found["revision"], found["path"])
    if FILE_NAME.search(source):
        return Path(source)
    raise UserError(
        "conversations not found",
        f"data.conversations = {source!r}",
        "give a file of conversations (.json, .jsonl, .gz, .zst) or a hub id "
        "org/name[@revision][:path/file.json]",
    )


def fetch_file(data: HubData) -> Path:
    """The one file of a hub data set, in the hub's cache; downloaded unless it is there.

    Raises:
        UserError: there is no such file, or the hub cannot be reached.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    assert data.path is not None, f"{data} names no file"
    try:
        return Path(
            hf_hub_download(data.repository, data.path, repo_type="dataset", revision=data.revision)
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise hub_error(data, error) from error


def is_cached(data: HubData) -> bool:
    """Whether one file of a hub data set lies in the hub's cache; never for a whole split."""
    from huggingface_hub import try_to_load_from_cache

    if data.path is None:
        return False
    found = try_to_load_from_cache(
        data.repository, data.path, repo_type="dataset", revision=data.revision
    )
    return isinstance(found, str)


def hub_error(data: HubData, error: Exception) -> UserError:
    """A failed look-up or download, in one line."""
    needed = "that it has a train split" if data.path is None else "the path in it"
    return UserError(
        "cannot load the hub dataset",
        f"{data} ({type(error).__name__}: {(str(error) or 'no reason given').splitlines()[0]})",
        f"check the id, the network and {needed}; or give a local file",
    )
