"""Checks a chain before anything of it is loaded: paths, digests, configs and tensor shapes."""

import os
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.readable import readable_bytes
from polybasic.chain.formats.checkpoints.checkpoint import (
    WEIGHT_SUFFIXES,
    model_files,
    weight_files,
)
from polybasic.chain.formats.checkpoints.config import (
    ConfigFile,
    check_feature_layers,
    read_config,
    refuse_remote_code,
)
from polybasic.chain.formats.checkpoints.decoder_config import HeadConfig
from polybasic.chain.formats.checkpoints.kinds import is_head
from polybasic.chain.formats.checkpoints.models import resolve_model
from polybasic.chain.formats.checkpoints.quantization import read_quantization_config
from polybasic.chain.formats.checkpoints.shapes import check_shapes
from polybasic.chain.formats.files import lies_anywhere, read_json, sha256_of_file
from polybasic.chain.formats.head_kinds.early_exit import check_exit_layer
from polybasic.chain.formats.head_kinds.steering import check_steered
from polybasic.chain.formats.head_kinds.table import HEAD_KINDS
from polybasic.chain.formats.kept import known
from polybasic.chain.formats.lineage import find_drafts_for, find_steered, verifier_of
from polybasic.chain.formats.manifest import (
    MANIFEST_NAME,
    Manifest,
    Member,
    Reference,
    read_manifest,
)
from polybasic.chain.formats.vocabulary import (
    TOKENIZER_NAME,
    check_same_vocabulary,
    num_token_ids,
    read_vocabulary,
)

_PACKAGE_AGAIN = "package the chain again or fetch the file anew"
_TARGET_PATH = "members[0].reference.path"
_NAME_TARGET = "name where it lies with --target PATH"
_NAME_ANOTHER = "name the model that the chain was made for with --target PATH"
_CODE_SUFFIXES = {
    *(".py", ".pyc", ".pyd", ".pyo", ".pyw", ".so", ".dll", ".dylib", ".exe", ".sh"),
    *(".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz"),
}
_COMMIT = re.compile(r"[0-9a-f]{40}")
_READ_SUFFIXES = {".bin", ".safetensors", ".json", ".jinja", ".model", ".txt"}


@dataclass(frozen=True)
class CheckedChain:
    """A chain that may be loaded: its manifest and its members.

    Attributes:
        members: where they lie, by name.
        configs: what their config.json say, by name.
        tokenizer: where it lies.
        warnings: one line each, of what is allowed and costs speed.
        elsewhere: members whose weights are not needed here, and may be missing.
        named_target: what the target was taken from instead of from where the chain says.
    """

    folder: Path
    manifest: Manifest
    members: dict[str, Path]
    configs: dict[str, ConfigFile]
    tokenizer: Path
    warnings: tuple[str, ...] = ()
    elsewhere: frozenset[str] = frozenset()
    named_target: str | None = None

    @property
    def loaded(self) -> tuple[Member, ...]:
        """The members whose weights are loaded here."""
        return tuple(
            member for member in self.manifest.members if member.name not in self.elsewhere
        )

    @property
    def target(self) -> Path:
        """Where the first member lies."""
        return self.target_config.folder

    @property
    def target_config(self) -> ConfigFile:
        """Of the first member."""
        return self.configs[self.manifest.members[0].name]


def check_chain(
    folder: Path,
    digests: bool = True,
    elsewhere: Container[str] = (),
    target: str | Path | None = None,
    sha256: Callable[[Path], str] = sha256_of_file,
) -> CheckedChain:
    """Check all that loading relies on; nothing of the chain is executed.

    Args:
        folder: the chain.
        digests: also compare the sha256 of every file.
        elsewhere: members that are not loaded here, whose weights need not be there.
        target: the folder or hub id that the target is taken from; None for what the chain says.
        sha256: gives a file's digest.

    Raises:
        UserError: the first fault found, with the file or tensor that it is in.
    """
    manifest = read_manifest(folder)
    _refuse_link_outside(folder, folder / MANIFEST_NAME)
    tokenizer = folder_inside(folder, manifest.tokenizer.path, "tokenizer.path")
    absent = frozenset(member.name for member in manifest.members if member.name in elsewhere)
    paths = {member.name: member.reference.path for member in manifest.members}
    inside = {name: path for name, path in paths.items() if path is not None}
    if target is not None:
        inside.pop(manifest.members[0].name, None)
    folders: dict[str, Path] = {}
    for index, member in enumerate(manifest.members):
        has_weights = member.name not in absent
        if (path := inside.get(member.name)) is not None:
            found = folder_inside(folder, path, f"members[{index}].reference.path")
        elif index == 0 and target is not None:
            found = resolve_model(str(target), weights=has_weights)
        else:
            found = source_folder(folder, member.reference, has_weights)
        folders[member.name] = found
    digest_of = sha256 if digests else None
    _check_files(folder, tokenizer, manifest.tokenizer.files, "tokenizer", digest_of)
    for member in manifest.members:
        chain = folder if member.name in inside else None
        is_absent = member.name in absent
        _check_files(chain, folders[member.name], member.files, member.name, digest_of, is_absent)
        if not is_absent:
            check_listed(member, folders[member.name])
    configs = check_fit(manifest.members, folders, tokenizer, absent)
    _check_trees(manifest, configs)
    warnings = size_warnings(manifest.members)
    named = None if target is None else str(target)
    return CheckedChain(folder, manifest, folders, configs, tokenizer, warnings, absent, named)


def check_fit(
    members: Sequence[Member],
    folders: dict[str, Path],
    tokenizer: Path,
    elsewhere: Container[str] = (),
) -> dict[str, ConfigFile]:
    """Check that the members belong together; digests are taken from `members` as they are.

    Depth and width may differ from member to member; vocabulary and tokenizer may not.

    Args:
        members: from the target down.
        folders: where each member's files lie, by name.
        tokenizer: the folder of the tokenizer.
        elsewhere: members whose weights are not there.

    Returns:
        The config of each member, by name.

    Raises:
        UserError: remote code, another vocabulary or tokenizer, a head whose model is not among
            the members, a wrong `drafts_for`, an unknown quantization, tensors that do not fit
            their config, heads that run or read layers which their model does not have, or two
            heads of one model that read different ones.
    """
    target, *others = members
    configs = {member.name: read_config(folders[member.name]) for member in members}
    for member in others:
        _check_vocab_size(target, member, configs)
    _check_tokenizer(tokenizer, configs[target.name].content["vocab_size"])
    for member in others:
        _check_same_tokenizer(member, folders[member.name], tokenizer)
    _check_drafts_for(members, configs)
    for member in members:
        config = configs[member.name]
        group_size = _check_quantization(member, config)
        if is_head(member.kind):
            _check_kind(member, config)
        if member.name not in elsewhere:
            check_shapes(member.kind, config.folder, config.of(member.kind), group_size)
    _check_feature_layers(members, configs)
    for member in others:
        _check_encoder(target, member, configs)
    return configs


def size_warnings(members: Sequence[Member]) -> tuple[str, ...]:
    """One line for each verifying member that is larger than the one above it, with its cost.

    Such a chain runs, and it is exact. It is slow: decoding reads all weights at each pass.

    Args:
        members: from the target down.
    """
    verifying = [member for member in members if member.role != "drafter"]
    return tuple(
        f"{below.name} is larger than {above.name} above it: a pass of {below.name} reads "
        f"{readable_bytes(below.num_bytes)}, one of {above.name} "
        f"{readable_bytes(above.num_bytes)}; leave {below.name} out of the plan, or use a "
        "smaller model"
        for above, below in pairwise(verifying)
        if below.num_bytes > above.num_bytes
    )


def source_folder(chain: Path, reference: Reference, weights: bool = True) -> Path:
    """The folder of a member outside of the chain.

    Args:
        weights: False fetches only what is beside them.

    Raises:
        UserError: it is not there or cannot be fetched.
    """
    assert reference.source is not None, "manifest checks that a path or a source is given"
    if not reference.source.startswith((".", "/")):
        try:
            return resolve_model(reference.source, reference.revision, weights)
        except UserError as error:
            raise UserError(error.what, error.where, f"{error.do}, or {_NAME_TARGET}") from error
    folder = os.path.normpath(chain.resolve() / reference.source)
    if not lies_anywhere(Path(folder)):
        raise UserError(
            "target is not there",
            f"{folder}, which {chain / MANIFEST_NAME} refers to",
            f"{_NAME_TARGET}, or package the chain with package.copy_target=auto",
        )
    return resolve_model(folder)


def folder_inside(chain: Path, relative: str, location: str) -> Path:
    """The folder of a member inside the chain.

    Args:
        location: that errors name.

    Raises:
        UserError: it is missing, or path or link leave the chain.
    """
    where = f"{location} = {relative!r} in {chain / MANIFEST_NAME}"
    parts = PurePosixPath(relative)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        raise UserError("member path leaves the chain", where, "package the chain again")
    folder = chain / relative
    _refuse_link_outside(chain, folder)
    if not folder.is_dir():
        do = f"{_PACKAGE_AGAIN}, or {_NAME_TARGET}" if location == _TARGET_PATH else _PACKAGE_AGAIN
        raise UserError("member folder not found", where, do)
    return folder


def _refuse_link_outside(chain: Path, path: Path) -> None:
    try:
        root, found = chain.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise UserError(
            "link leads nowhere", f"{path} ({error})", "replace the link by the files themselves"
        ) from error
    roots = [root]
    if root.parent.name == "snapshots" and _COMMIT.fullmatch(root.name):
        # in the hub's cache, files of a snapshot are links into the blobs folder beside it
        roots.append(root.parent.parent / "blobs")
    if not any(found.is_relative_to(each) for each in roots):
        raise UserError(
            "link leaves the chain",
            f"{path} points to {found}",
            "replace the link by the files themselves",
        )


def _suffixes(path: Path) -> set[str]:
    """All endings of a file's name, however they are spelled: "Model.PY " is a ".py"."""
    return {suffix.strip().lower() for suffix in Path(path.name.rstrip(". ")).suffixes}


def _check_files(
    chain: Path | None,
    folder: Path,
    files: dict[str, str],
    name: str,
    sha256: Callable[[Path], str] | None,
    lacks_weights: bool = False,
) -> None:
    """Check one folder's files against their digests; `chain` is None for a folder outside."""
    again = _NAME_ANOTHER if chain is None else _PACKAGE_AGAIN
    for file_name, expected in sorted(files.items()):
        if PurePosixPath(file_name).name != file_name or file_name == "..":
            raise UserError(
                "file name leaves its member", f"{file_name!r} of {name}", "package the chain again"
            )
        path = folder / file_name
        if _suffixes(path) & _CODE_SUFFIXES:
            raise UserError("code or pickle in the chain", f"{path}", "remove it: it is never run")
        if lacks_weights and file_name.endswith((*WEIGHT_SUFFIXES, ".index.json")):
            continue
        if chain is not None:
            _refuse_link_outside(chain, path)
        if not path.is_file():
            raise UserError("missing file", f"{path}", again)
        if sha256 is not None:
            check_digest(path, expected, again, sha256)
    if chain is not None:
        _refuse_unlisted(folder, files)


def check_digest(
    path: Path,
    expected: str,
    do: str = _PACKAGE_AGAIN,
    sha256: Callable[[Path], str] = sha256_of_file,
) -> None:
    """Compare a file with the digest that the manifest has of it.

    Raises:
        UserError: it differs; `do` says what to do then.
    """
    if (found := sha256(path)) != expected:
        raise UserError(
            "digest mismatch",
            f"{path} has sha256 {found[:8]}…, manifest says {expected[:8]}…",
            do,
        )


def _refuse_unlisted(folder: Path, files: dict[str, str]) -> None:
    for path in sorted(folder.rglob("*")):
        is_listed = path.parent == folder and path.name in files
        if not is_listed and _suffixes(path) & (_CODE_SUFFIXES | _READ_SUFFIXES):
            raise UserError("file not in the manifest", f"{path}", "remove it or package again")


def check_listed(member: Member, folder: Path) -> None:
    """Check that the manifest lists all that loading would read of a member, wherever it lies.

    Raises:
        UserError: a file that it does not list, or a pickle of another member than the target.
    """
    for name in model_files(folder):
        if name not in member.files:
            raise UserError(
                "file not in the manifest", f"{folder / name}", "remove it or package again"
            )
    for path in weight_files(folder):
        if path.suffix != ".safetensors" and member.role != "target":
            raise UserError(
                "pickle refused", f"{path}", f"store the {member.role} as model.safetensors"
            )


def _check_vocab_size(target: Member, other: Member, configs: dict[str, ConfigFile]) -> None:
    expected, found = (configs[member.name].content.get("vocab_size") for member in (target, other))
    if found != expected or found is None:
        raise UserError(
            "vocab_size differs",
            f"{found} in the config of {other.name}, {expected} in that of {target.name}",
            "all members of a chain share the target's vocabulary",
        )


def _check_encoder(target: Member, other: Member, configs: dict[str, ConfigFile]) -> None:
    ours, theirs = (configs[member.name].of(member.kind).encoder for member in (target, other))
    start, found = (None if each is None else each.start_token_id for each in (ours, theirs))
    if found != start:
        raise UserError(
            "members read prompts in different ways",
            f"start token {found} in the config of {other.name}, {start} in that of {target.name}",
            "all members are decoders, or encoder-decoders with one start token",
        )


def _check_tokenizer(folder: Path, vocab_size: int) -> None:
    path = folder / TOKENIZER_NAME
    config_path = folder / "tokenizer_config.json"
    if config_path.is_file() and isinstance(config := read_json(config_path, "config"), dict):
        refuse_remote_code(config_path, config)
    if not path.is_file():
        raise UserError("no tokenizer", f"{path} is missing", _PACKAGE_AGAIN)
    num_ids = known(path, "num_ids", num_token_ids)
    if num_ids > vocab_size:
        raise UserError(
            "tokenizer larger than the vocabulary",
            f"{num_ids} ids in {path}, vocab_size {vocab_size} in the target",
            "take the tokenizer that belongs to the target",
        )


def _check_same_tokenizer(member: Member, folder: Path, tokenizer: Path) -> None:
    path, expected = folder / TOKENIZER_NAME, tokenizer / TOKENIZER_NAME
    # large vocabularies take seconds to parse; members of one target carry the same bytes
    if not path.is_file() or sha256_of_file(path) == sha256_of_file(expected):
        return
    found, vocabulary = read_vocabulary(path), read_vocabulary(expected)
    check_same_vocabulary(found, vocabulary, member.name, path, expected)


def _check_drafts_for(members: Sequence[Member], configs: dict[str, ConfigFile]) -> None:
    verifiers = [
        verifier_of(member, configs[member.name]) for member in members if member.role != "drafter"
    ]
    for member in members:
        if member.role != "drafter":
            continue
        found = find_drafts_for(member.name, member.kind, configs[member.name], verifiers)
        if member.drafts_for != found:
            raise UserError(
                "manifest and configs disagree",
                f"drafts_for of {member.name} is {', '.join(member.drafts_for)}, by the digests "
                f"in the configs {', '.join(found)}",
                "package the chain again",
            )


def _check_kind(member: Member, config: ConfigFile) -> None:
    if config.head.kind != member.kind:
        raise UserError(
            "head of another kind",
            f"{member.name} is {member.kind}, by {config.path} {config.head.kind}",
            "name its kind, or fetch the head again",
        )


def _check_trees(manifest: Manifest, configs: dict[str, ConfigFile]) -> None:
    """That drafters have as many tokens to draft as their trees take of each row."""
    measured = [plan for entry in manifest.plans for plan in entry.all_plans]
    for plan in (manifest.plan, *measured):
        drafter = manifest.member(plan.members[-1])
        config = configs[drafter.name].of(drafter.kind)
        num = config.num_draft_tokens if isinstance(config, HeadConfig) else config.vocab_size
        if drafter.role == "drafter" and plan.tree.top_k > num:
            raise UserError(
                "tree wider than the drafter's vocabulary",
                f"top_k {plan.tree.top_k} in a plan, {drafter.name} drafts {num} tokens",
                "run `polybasic plan` with smaller trees, or package the chain again",
            )


def _check_feature_layers(members: Sequence[Member], configs: dict[str, ConfigFile]) -> None:
    """That verifying members have the layers that heads run or read, and hand out one choice."""
    found: dict[str, HeadConfig] = {}
    for member in members:
        head, where = configs[member.name].of(member.kind), f"{configs[member.name].path}"
        if not isinstance(head, HeadConfig):
            continue
        if HEAD_KINDS[head.kind].steers:
            steered = find_steered(member.name, configs[member.name], members, configs)
            check_steered(head, configs[steered.name].decoder, where)
        for name in member.drafts_for:
            check_exit_layer(head, configs[name].decoder.num_layers, where)
        if not head.feature_layers:
            continue
        for name in member.drafts_for:
            check_feature_layers(head, configs[name].decoder.num_layers, where)
            if (layers := found.setdefault(name, head).feature_layers) != head.feature_layers:
                raise UserError(
                    "heads of one model read different layers",
                    f"{where} reads {_shown(head.feature_layers)} of {name}, another head "
                    f"{_shown(layers)}",
                    "package a chain with one of these heads",
                )


def _shown(layers: Sequence[int]) -> str:
    return f"layers {', '.join(map(str, layers))}"


def _check_quantization(member: Member, config: ConfigFile) -> int | None:
    """The group size of an AWQ member, None for the others."""
    if member.kind == "awq":
        return read_quantization_config(config.content, config.path)
    if config.content.get("quantization_config") is not None:
        raise UserError(
            f"{member.name} is quantized",
            f"quantization_config in {config.path}",
            f"a member of kind {member.kind} must not be",
        )
    return None
