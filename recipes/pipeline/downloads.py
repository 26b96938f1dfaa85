"""A file that a recipe names by its URL, fetched whole."""

import http.client
import re
import urllib.error
import urllib.request
from pathlib import Path

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import whole_file

_URL = re.compile(r"https?://\S+")
_TIMEOUT_SECONDS = 60
_READ_BYTES = 1 << 20


def is_url(name: str) -> bool:
    """Whether a recipe's value is fetched over HTTP."""
    return bool(_URL.fullmatch(name))


def fetch(url: str, path: Path, key: str) -> None:
    """Download `url` to `path`, whole or not at all.

    Args:
        url: https:// or http://.
        path: file to write; an older one is replaced.
        key: of the recipe that holds the URL, for errors.

    Raises:
        UserError: not found, refused, not reached, cut off, or a full disk.
    """
    what, where = "download failed", f"{key} = {url}"
    try:
        with (
            urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response,
            whole_file(path) as partial,
            partial.open("wb") as written,
        ):
            expected = response.headers.get("Content-Length")
            while chunk := response.read(_READ_BYTES):
                written.write(chunk)
            if expected is not None and written.tell() != int(expected):
                raise http.client.IncompleteRead(b"", int(expected) - written.tell())
    except urllib.error.HTTPError as error:
        raise UserError(what, f"{where} ({error.code} {error.reason})", "check the URL") from error
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError) as error:
        reason = getattr(error, "reason", error)
        raise UserError(
            what, f"{where} ({reason})", f"check the network, or set {key} to a local file"
        ) from error
