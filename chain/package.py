"""Packs a target, an intermediate and a draft head into one chain folder."""

import os
from pathlib import Path
from typing import Any

from polybasic.chain.card import write_card
from polybasic.chain.checkpoint import (
    checkpoint_files,
    copy_files,
    model_files,
    split_hub_id,
    tokenizer_files,
    weight_files,
)
from polybasic.chain.errors import UserError
from polybasic.chain.files import sha256_of_file, whole_folder
from polybasic.chain.manifest import (
    MANIFEST_NAME,
    Kind,
    Manifest,
    Member,
    Plan,
    Provenance,
    Reference,
    Role,
    TokenizerFiles,
    write_manifest,
)
from polybasic.chain.shapes import main_dtype, num_parameters, tensor_headers
from polybasic.chain.verify import check_fit, check_weight_files

_DRAFT_FILES = ["config.json", "model.safetensors"]


def package_chain(
    out: Path,
    target: Path,
    target_reference: str,
    copy_target: bool,
    intermediate: Path,
    draft: Path,
    plan: Plan,
    provenance: Provenance,
    quality: dict[str, Any] | None,
    training: dict[str, Any] | None,
) -> Manifest:
    """Write the chain folder `out`, whole; an older chain there is replaced.

    Args:
        out: the chain folder (or the caller's own `.partial` folder of one).
        target: the target's folder.
        target_reference: how the user named it, a folder or `org/name[@revision]`; kept as the
            reference, with the commit when `target` is a snapshot of the hub's cache.
        copy_target: put a copy into the chain instead of referring to it.
        intermediate: an AWQ checkpoint.
        draft: a folder with config.json and model.safetensors of an EAGLE-2 head.
        plan: how the chain runs; its members are named target, intermediate and draft.
        provenance: how the members were made.
        quality: record of `measure_quality`.
        training: summary of `train_head`.

    Raises:
        UserError: the members do not belong together, `out` holds something else or one of the
            sources, or the disk is full.
    """
    sources = {"target": target, "intermediate": intermediate, "draft": draft}
    _refuse_replacing(out, sources)
    _require(draft, _DRAFT_FILES)
    reference = _target_reference(out, target, target_reference, copy_target)
    files = {
        "target": checkpoint_files(target) if copy_target else model_files(target),
        "intermediate": checkpoint_files(intermediate),
        "draft": _DRAFT_FILES,
    }
    members = (
        _member("target", "target", "decoder", reference, target, files["target"]),
        _member(
            "intermediate",
            "intermediate",
            "awq",
            Reference(path="intermediate"),
            intermediate,
            files["intermediate"],
        ),
        _member("draft", "drafter", "eagle2", Reference(path="draft"), draft, files["draft"]),
    )
    for member in members:
        check_weight_files(member, sources[member.name])
    tokenizer = TokenizerFiles(path="tokenizer", files=_digests(target, tokenizer_files(target)))
    check_fit(members, sources, target)
    manifest = Manifest(
        members=members,
        tokenizer=tokenizer,
        plan=plan,
        provenance=provenance,
        quality=quality,
        training=training,
    )
    with whole_folder(out) as partial:
        for member in members:
            if member.reference.path is not None:
                destination = partial / member.reference.path
                copy_files(sources[member.name], destination, files[member.name])
        copy_files(target, partial / tokenizer.path, list(tokenizer.files))
        write_manifest(partial, manifest)
        write_card(partial, manifest)
    return manifest


def _member(
    name: str, role: Role, kind: Kind, reference: Reference, folder: Path, files: list[str]
) -> Member:
    headers = tensor_headers(folder)
    return Member(
        name=name,
        role=role,
        kind=kind,
        reference=reference,
        dtype="int4" if kind == "awq" else main_dtype(headers),
        num_parameters=num_parameters(headers),
        num_bytes=sum(path.stat().st_size for path in weight_files(folder)),
        files=_digests(folder, files),
    )


def _digests(folder: Path, names: list[str]) -> dict[str, str]:
    return {name: sha256_of_file(folder / name) for name in sorted(names)}


def _target_reference(out: Path, target: Path, written: str, copy_target: bool) -> Reference:
    path = "target" if copy_target else None
    if not Path(written).expanduser().exists():
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


def _refuse_replacing(out: Path, sources: dict[str, Path]) -> None:
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


def _require(folder: Path, names: list[str]) -> None:
    for name in names:
        if not (folder / name).is_file():
            raise UserError(
                "incomplete draft head", f"no {name} in {folder}", "train it with `polybasic train`"
            )
