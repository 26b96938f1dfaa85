"""Downloads from the hub: into its cache, continued after a cut, refused in one line."""

from collections.abc import Callable, Sequence
from pathlib import Path

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import disk_errors


def snapshot(repository: str, revision: str | None, patterns: Sequence[str] | None) -> Path:
    """Download files of a repository unless they are in the hub's cache, with bars on stderr.

    Files that are whole are kept when a download breaks off; within a run the rest of a file is
    asked for again.

    Args:
        repository: org/name.
        revision: commit, tag or branch; default: the main branch.
        patterns: of names in the top folder, or of paths; None for all files of all folders.

    Returns:
        The folder of this commit in the cache; it is named after the commit.

    Raises:
        UserError: missing, gated, not reached, cut off too often, or disk full.
    """
    from huggingface_hub import constants, errors, snapshot_download

    all_folders = patterns is None or any("/" in pattern for pattern in patterns)
    where = repository if revision is None else f"{repository}@{revision}"
    download: Callable[..., str] = snapshot_download
    try:
        with disk_errors(Path(constants.HF_HUB_CACHE)):
            return Path(
                download(
                    repository,
                    revision=revision,
                    allow_patterns=None if patterns is None else list(patterns),
                    ignore_patterns=None if all_folders else ["*/*"],
                )
            )
    except errors.HFValidationError as error:
        raise UserError("not a hub id", where, "name a folder or org/name[@revision]") from error
    except (ValueError, TypeError, AssertionError) as error:
        # names of files or commits that would lead out of the cache, or are none
        raise UserError(
            "unusable repository", f"{where} ({_first_line(error)})", "name another one"
        ) from error
    except (OSError, errors.HTTPError) as error:
        raise _refusal(error, where, f"{constants.ENDPOINT}/{repository}") from error


def _refusal(error: Exception, where: str, page: str) -> UserError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return UserError(
            "gated repository", where, f"accept its terms at {page}, then `hf auth login`"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return UserError(
            "repository not found",
            f"{where} is neither a folder here nor a repository that you may read",
            "check the spelling; for a private one `hf auth login`",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError("revision not found", where, f"see {page}/commits for what exists")
    is_answer = isinstance(error.__cause__, errors.HfHubHTTPError)
    if isinstance(error, errors.LocalEntryNotFoundError) and not is_answer:
        return UserError(
            "hub not reached",
            f"{where} is no folder here and not whole in the hub's cache",
            "connect (unset HF_HUB_OFFLINE) and run again, or name a folder",
        )
    reason = _first_line(error.__cause__ if is_answer else error)
    return UserError("download failed", f"{where} ({reason})", "run again to resume")


def _first_line(error: BaseException | None) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)
