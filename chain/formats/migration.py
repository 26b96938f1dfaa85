"""Chains of older schemas, brought to the present one. No torch in here."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.card import write_card
from polybasic.chain.formats.checkpoints.checkpoint import WEIGHT_SUFFIXES
from polybasic.chain.formats.files import (
    read_json,
    sha256_of_file,
    sha256_of_object,
    whole_file,
    write_json,
)
from polybasic.chain.formats.lineage import QUANTIZED_FROM_KEY
from polybasic.chain.formats.manifest import (
    MANIFEST_NAME,
    OLDER_SCHEMAS,
    read_content,
    read_manifest,
    validated_manifest,
    write_manifest,
)
from polybasic.chain.formats.origin import ORIGIN_KEY, recorded
from polybasic.chain.formats.verify import check_digest, folder_inside

Content = dict[str, Any]


@dataclass(frozen=True)
class Migration:
    """What bringing a chain to the present schema came to.

    Attributes:
        schema: that the chain was of.
        kept: the older manifest, beside the new one.
        left_out: what was measured and is not in the new manifest, for people.
    """

    schema: str
    kept: Path
    left_out: Sequence[str]


def migrate_chain(folder: Path) -> Migration | None:
    """Bring a chain's manifest and card to the present schema; weights stay as they are.

    The older manifest is kept beside it as chain.N.json. An interrupted migration is done again.
    Plans and results that were measured are left out: older kernels and rules gave them.

    Returns:
        None if the chain is of the present schema already.

    Raises:
        UserError: `folder` is no chain, its manifest is malformed or of an unknown version, or the
            disk is full or not writable.
    """
    path = folder / MANIFEST_NAME
    content = read_content(folder)
    if (schema := content.pop("schema")) not in OLDER_SCHEMAS:
        read_manifest(folder)
        return None
    measured = {"plans": content.pop("plans", ()), "results": content.pop("results", None)}
    steps = (_from_1_to_2, _from_2_to_3)[OLDER_SCHEMAS.index(schema) :]
    try:
        for step in steps:
            step(content, folder)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise UserError(
            "malformed manifest",
            f"{path} ({schema}; {type(error).__name__}: {error})",
            "package the chain again",
        ) from error
    manifest = validated_manifest(content, path)
    kept = path.with_name(f"chain.{schema.rpartition('/')[2]}.json")
    with whole_file(kept) as partial:
        shutil.copyfile(path, partial)
    write_manifest(folder, manifest)
    write_card(folder, manifest)
    return Migration(schema, kept, [name for name, value in measured.items() if value])


def _from_1_to_2(content: Content, folder: Path) -> None:
    """Any number of members: drafters name whom they draft for, and a plan each verifier's flush.

    Before, the one head drafted for the target and for its 4-bit copies, which did not say of whom
    they were copies.
    """
    verifying = [member for member in content["members"] if member["role"] != "drafter"]
    target, *below = verifying
    copies = [member for member in below if member["kind"] == "awq"]
    weights = {
        name: digest for name, digest in target["files"].items() if name.endswith(WEIGHT_SUFFIXES)
    }
    for copy in copies:
        _record_lineage(copy, sha256_of_object(weights), folder)
    for drafter in content["members"][len(verifying) :]:
        drafter["drafts_for"] = [member["name"] for member in (target, *copies)]
    plan = content["plan"]
    flush = {"length": plan.pop("flush_length"), "rule": plan.pop("rule", "block")}
    plan["flush"] = {member["name"]: dict(flush) for member in verifying[:-1]}
    _name_record(content, "quality", below)
    _name_record(content, "training", content["members"][-1:])


def _name_record(content: Content, key: str, members: Sequence[Content]) -> None:
    """Say whom the one record of older chains is about: the first of `members`."""
    record = content.pop(key, None)
    content[key] = {members[0]["name"]: record} if record and members else {}


def _record_lineage(copy: Content, target_digest: str, folder: Path) -> None:
    """Let a copy's config.json say what it was made from."""
    where = f"reference.path of {copy['name']}"
    path = folder_inside(folder, str(copy["reference"].get("path") or ""), where) / "config.json"
    config = read_json(path, "config")
    # else of a migration that was interrupted after this file was written
    if recorded(config, QUANTIZED_FROM_KEY) != target_digest:
        check_digest(path, copy["files"][path.name])
        config[ORIGIN_KEY] = {**config.get(ORIGIN_KEY, {}), QUANTIZED_FROM_KEY: target_digest}
        write_json(path, config)
    copy["files"][path.name] = sha256_of_file(path)


def _from_2_to_3(content: Content, folder: Path) -> None:
    """The rule belongs to the plan, and not to each of its flushes."""
    plan = content["plan"]
    rules = [flush.pop("rule", "block") for flush in plan.get("flush", {}).values()]
    plan["rule"] = rules[0] if rules else "block"
