"""Packs a target and any number of other members into one chain folder."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.card import write_card
from polybasic.chain.formats.checkpoints.checkpoint import (
    checkpoint_files,
    copy_files,
    model_files,
    split_hub_id,
    tokenizer_files,
    weight_files,
)
from polybasic.chain.formats.checkpoints.config import ConfigFile, read_config
from polybasic.chain.formats.checkpoints.kinds import Kind, is_head
from polybasic.chain.formats.checkpoints.shapes import main_dtype, num_parameters, tensor_headers
from polybasic.chain.formats.files import lies_anywhere, sha256_of_file, whole_folder
from polybasic.chain.formats.gguf.finding import names_gguf
from polybasic.chain.formats.lineage import QUANTIZED_FROM_KEY, find_drafts_for, verifier_of
from polybasic.chain.formats.manifest import (
    MANIFEST_NAME,
    GGUFOrigin,
    Manifest,
    Member,
    Provenance,
    Reference,
    Role,
    TokenizerFiles,
    write_manifest,
)
from polybasic.chain.formats.origin import GGUF_KEY, ORIGIN_KEY, recorded
from polybasic.chain.formats.places import command_without_places, without_places
from polybasic.chain.formats.plan import Plan
from polybasic.chain.formats.verify import check_fit, check_listed, size_warnings

TARGET_NAME = "target"
_TOKENIZER_FOLDER = "tokenizer"
_OTHER_FOLDERS = (TARGET_NAME, _TOKENIZER_FOLDER, "report")
_HEAD_FILES = ["config.json", "model.safetensors"]


@dataclass(frozen=True)
class Part:
    """A member that goes into the chain folder.

    Attributes:
        name: of the member, and of its folder in the chain.
        role: intermediates verify, drafters draft.
        kind: "awq" (4 bits), "decoder" (a whole model as it is), or a kind of draft head.
        folder: its checkpoint.
    """

    name: str
    role: Role
    kind: Kind
    folder: Path


def package_chain(
    out: Path,
    target: Path,
    target_reference: str,
    copy_target: bool | Literal["auto"],
    parts: Sequence[Part],
    plan: Plan,
    provenance: Provenance,
    quality: dict[str, dict[str, Any]],
    training: dict[str, dict[str, Any]],
    tokenizer: Path | None = None,
) -> Manifest:
    """Write the chain folder `out`, whole; an older chain there is replaced.

    A member that is larger than the one above it is reported on stderr. What is said of the making
    names no folder: see `without_places`.

    Args:
        out: the chain folder (or the caller's own `.partial` folder of one).
        target: the target's folder; the member is called "target".
        target_reference: how the user named it, a folder or `org/name[@revision]`; kept as the
            reference, with the commit when `target` is a snapshot of the hub's cache.
        copy_target: put a copy into the chain instead of referring to it. "auto" does so for a
            folder, by hard links of its weight files where the disk has them; a hub id is referred
            to.
        parts: the other members in order: intermediates from the target down, then drafters.
        plan: how the chain runs until a plan is measured.
        provenance: how the members were made.
        quality: records of `measure_quality`, by name of the intermediate.
        training: summaries of `train_head`, by name of the head.
        tokenizer: folder of the chain's tokenizer; None for the target's own.

    Raises:
        UserError: the members do not belong together, `out` holds something else or one of the
            sources, or the disk is full.
    """
    sources = {TARGET_NAME: target} | {part.name: part.folder for part in parts}
    tokenizer = tokenizer or target
    _check_names(parts)
    refuse_replacing(out, sources | {_TOKENIZER_FOLDER: tokenizer})
    is_inside = is_local(target_reference) if copy_target == "auto" else copy_target
    reference = _target_reference(out, target, target_reference, is_inside)
    files = {TARGET_NAME: checkpoint_files(target) if is_inside else model_files(target)}
    files |= {part.name: _files_of(part) for part in parts}
    part = Part(TARGET_NAME, "target", read_config(target).kind, target)
    target_member = _member(part, reference, files)
    members = (target_member, *_members_of(parts, target_member, target, files))
    tokenizer_digests = _digests(tokenizer, _tokenizer_files(tokenizer))
    check_fit(members, sources, tokenizer)
    manifest = _manifest(
        members=members,
        tokenizer=TokenizerFiles(path=_TOKENIZER_FOLDER, files=tokenizer_digests),
        plan=plan,
        provenance=_without_places(provenance),
        quality=without_places(quality),
        training=without_places(training),
    )
    for warning in size_warnings(members):
        print(f"warning: {warning}", file=sys.stderr)
    with whole_folder(out) as partial:
        for member in members:
            if member.reference.path is not None:
                destination = partial / member.reference.path
                is_linked = copy_target == "auto" and member is target_member
                copy_files(sources[member.name], destination, files[member.name], is_linked)
        copy_files(tokenizer, partial / _TOKENIZER_FOLDER, list(tokenizer_digests))
        write_manifest(partial, manifest)
        write_card(partial, manifest)
    return manifest


def is_local(model: str) -> bool:
    """Whether a model is named by a folder that there is, or as a GGUF file; others are hub ids."""
    return names_gguf(model) or lies_anywhere(Path(model).expanduser())


def _without_places(provenance: Provenance) -> Provenance:
    recipe = without_places(provenance.recipe)
    command = command_without_places(shlex.split(provenance.command))
    return provenance.model_copy(update={"recipe": recipe, "command": command})


def _members_of(
    parts: Sequence[Part], target_member: Member, target: Path, files: dict[str, list[str]]
) -> list[Member]:
    """The parts' members; drafters are made last, so that each finds what it drafts for."""
    configs = {part.name: read_config(part.folder) for part in parts}
    members: dict[str, Member] = {}
    verifiers = [verifier_of(target_member, read_config(target))]
    for part in parts:
        if part.role != "drafter":
            member = _member(part, Reference(path=part.name), files)
            verifiers.append(verifier_of(member, configs[part.name]))
            members[part.name] = member
    for part in parts:
        if part.role == "drafter":
            drafts_for = find_drafts_for(part.name, part.kind, configs[part.name], verifiers)
            members[part.name] = _member(part, Reference(path=part.name), files, drafts_for)
    return [members[part.name] for part in parts]


def _member(
    part: Part,
    reference: Reference,
    files: dict[str, list[str]],
    drafts_for: tuple[str, ...] = (),
) -> Member:
    headers, config = tensor_headers(part.folder), read_config(part.folder)
    member = Member(
        name=part.name,
        role=part.role,
        kind=part.kind,
        reference=reference,
        dtype="int4" if part.kind == "awq" else main_dtype(headers),
        num_parameters=num_parameters(headers),
        num_bytes=sum(path.stat().st_size for path in weight_files(part.folder)),
        files=_digests(part.folder, files[part.name]),
        group_size=config.group_size if part.kind == "awq" else None,
        gguf=None if is_head(part.kind) else _gguf_origin(config),
        is_copy=recorded(config.content, QUANTIZED_FROM_KEY) is not None,
        drafts_for=drafts_for,
    )
    check_listed(member, part.folder)
    return member


def _gguf_origin(config: ConfigFile) -> GGUFOrigin | None:
    """Of a model that is as it was read, or of its 4-bit copy; heads have another origin."""
    origin = config.content.get(ORIGIN_KEY)
    found = origin.get(GGUF_KEY) if isinstance(origin, dict) else None
    if found is None:
        return None
    try:
        return GGUFOrigin.model_validate(found)
    except ValidationError as error:
        raise UserError(
            "malformed model config", f"{config.path} {ORIGIN_KEY}.{GGUF_KEY}", "fetch it again"
        ) from error


def _manifest(**content: Any) -> Manifest:
    try:
        return Manifest(**content)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        names = ", ".join(member.name for member in content["members"])
        raise UserError(
            "members and plan do not fit", f"{names} ({reason})", "change the parts or the plan"
        ) from error


def _check_names(parts: Sequence[Part]) -> None:
    for part in parts:
        if part.name in _OTHER_FOLDERS:
            raise UserError(
                "member name is taken",
                f"{part.name} ({part.folder})",
                f"choose another than {', '.join(_OTHER_FOLDERS)}",
            )


def _files_of(part: Part) -> list[str]:
    if not is_head(part.kind):
        return checkpoint_files(part.folder)
    for name in _HEAD_FILES:
        if not (part.folder / name).is_file():
            raise UserError(
                "incomplete draft head",
                f"no {name} in {part.folder}",
                "train it with `polybasic train`",
            )
    return _HEAD_FILES


def _tokenizer_files(folder: Path) -> list[str]:
    names = tokenizer_files(folder)
    # transformers chooses the tokenizer's class by the model's type too
    return [*names, "config.json"] if (folder / "config.json").is_file() else names


def _digests(folder: Path, names: list[str]) -> dict[str, str]:
    return {name: sha256_of_file(folder / name) for name in sorted(names)}


def _target_reference(out: Path, target: Path, written: str, copy_target: bool) -> Reference:
    path = "target" if copy_target else None
    if not is_local(written):
        repository, revision = split_hub_id(written)
        if target.parent.name == "snapshots":
            revision = target.name
        return Reference(path=path, source=repository, revision=revision)
    if copy_target:
        return Reference(path=path)
    folder, beside = target.resolve(), out.resolve().parent
    if folder.is_relative_to(beside):
        # a target beside the chain stays reachable when both are moved together
        return Reference(source=os.path.relpath(folder, out.resolve()))
    return Reference(source=str(folder))


def refuse_replacing(out: Path, sources: dict[str, Path]) -> None:
    """Refuse to write a chain over something else, or over what it is made of.

    Args:
        out: the chain folder to be written.
        sources: folders that it is made of, by what they are.

    Raises:
        UserError: `out` holds a source, or something that is no chain.
    """
    for name, source in sources.items():
        if source.resolve().is_relative_to(out.resolve()):
            raise UserError(
                f"{name} lies in the folder to be written", f"{source} in {out}", "choose another"
            )
    is_partial = out.name.startswith(".") and out.name.endswith(".partial")
    if out.is_file() or (
        out.is_dir() and not is_partial and any(out.iterdir()) and not _is_chain(out)
    ):
        raise UserError(
            "would replace something that is no chain",
            f"{out} (no {MANIFEST_NAME} in it)",
            "choose another folder or empty this one",
        )


def _is_chain(folder: Path) -> bool:
    return (folder / MANIFEST_NAME).is_file()
