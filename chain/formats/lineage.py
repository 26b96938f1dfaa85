"""Which verifying members a drafter can draft for, from the digests that configs record.

A head names the weights that it was trained for (`polybasic.target_sha256` in its config.json), a
4-bit checkpoint those that it was made from (`polybasic.quantized_from_sha256`). A head drafts for
its model and for 4-bit copies of it, whether the model itself is in the chain or not; one that runs
layers of its model drafts for that model alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.checkpoint import WEIGHT_SUFFIXES, weight_files
from polybasic.chain.formats.checkpoints.config import ConfigFile, read_config
from polybasic.chain.formats.checkpoints.kinds import Kind, is_head
from polybasic.chain.formats.files import sha256_of_file, sha256_of_object, write_json
from polybasic.chain.formats.head_kinds.steering import STEERED_KEY
from polybasic.chain.formats.head_kinds.table import HEAD_KINDS
from polybasic.chain.formats.manifest import Member
from polybasic.chain.formats.origin import GGUF_KEY, ORIGIN_KEY, recorded

TRAINED_FOR_KEY = "target_sha256"
QUANTIZED_FROM_KEY = "quantized_from_sha256"


@dataclass(frozen=True)
class VerifierIdentity:
    """What tells whether a head fits a verifying member.

    Attributes:
        name: of the member.
        hidden_size: of its config; None where that has none.
        sha256: `weights_digest` of its weights.
        made_from: the same of the weights that it is a 4-bit copy of, where it says so.
    """

    name: str
    hidden_size: int | None
    sha256: str
    made_from: str | None


def weights_digest(folder: Path) -> str:
    """Hex SHA-256 that names the weights in `folder`, whatever the folder is called.

    It is taken over {file name: digest of its bytes} of the files that loading reads.

    Raises:
        UserError: the folder is missing or holds no weight file.
    """
    return sha256_of_object({path.name: sha256_of_file(path) for path in weight_files(folder)})


def declare_trained_for(head: Path, model: Path) -> None:
    """Let a head draft for the same weights in another form: of a GGUF file, its blocks.

    Args:
        head: folder, whose config.json is written anew.
        model: folder of the weights.

    Raises:
        UserError: as `read_config` and `weights_digest`.
    """
    config = read_config(head)
    origin = config.content[ORIGIN_KEY] | {TRAINED_FOR_KEY: weights_digest(model)}
    write_json(config.path, config.content | {ORIGIN_KEY: origin})


def verifier_of(member: Member, config: ConfigFile) -> VerifierIdentity:
    """Describe a verifying member; digests are taken from its manifest entry."""
    weights = {
        name: digest for name, digest in member.files.items() if name.endswith(WEIGHT_SUFFIXES)
    }
    return VerifierIdentity(
        name=member.name,
        hidden_size=config.content.get("hidden_size"),
        sha256=sha256_of_object(weights),
        made_from=recorded(config.content, QUANTIZED_FROM_KEY),
    )


def origin_of_copy(source: ConfigFile) -> dict[str, Any]:
    """What the config of a 4-bit copy records: of which weights, and the GGUF files they are of.

    Args:
        source: of the model that the copy is made of.
    """
    origin: dict[str, Any] = {QUANTIZED_FROM_KEY: weights_digest(source.folder)}
    of_source = source.content.get(ORIGIN_KEY)
    if isinstance(of_source, dict) and GGUF_KEY in of_source:
        origin[GGUF_KEY] = of_source[GGUF_KEY]
    return origin


def find_drafts_for(
    name: str, kind: Kind, config: ConfigFile, verifiers: Sequence[VerifierIdentity]
) -> tuple[str, ...]:
    """Names of the verifying members that a drafter can draft for, from the target down.

    Args:
        name: of the drafter.
        kind: a head reads the states of its model; any other model stands on its own and drafts
            for all.
        config: of the drafter.
        verifiers: the verifying members.

    Raises:
        UserError: a head that does not say what it was trained for, whose model has no member, or
            that is of another width than its model.
    """
    if not is_head(kind):
        return tuple(verifier.name for verifier in verifiers)
    trained_for = recorded(config.content, TRAINED_FOR_KEY)
    if trained_for is None:
        raise UserError(
            "head without target",
            f"no {ORIGIN_KEY}.{TRAINED_FOR_KEY} in {config.path}",
            "train the head with `polybasic train`",
        )
    runs_layers = HEAD_KINDS[kind].shares_cache
    models = [
        model
        for model in verifiers
        if trained_for == model.sha256 or (trained_for == model.made_from and not runs_layers)
    ]
    if not models:
        raise UserError(
            "head without its model",
            f"{name} in {config.path} was trained for weights {trained_for[:8]}…, the chain has "
            f"{', '.join(map(_shown, verifiers))}",
            "train a head for one of them, or add the model that it was trained for",
        )
    width = config.content.get("hidden_size")
    fitting = tuple(model.name for model in models if model.hidden_size == width)
    if not fitting:
        raise UserError(
            "hidden_size differs",
            f"{width} in the config of {name}, {models[0].hidden_size} in that of "
            f"{models[0].name}, which it was trained for",
            f"train {name} again",
        )
    return fitting


def find_steered(
    name: str, config: ConfigFile, members: Sequence[Member], configs: Mapping[str, ConfigFile]
) -> Member:
    """The independent model that a steering is for, by the digest in its config.

    Args:
        name: of the steering.
        config: of the steering.
        members: of the chain.
        configs: of the members, by name.

    Raises:
        UserError: no member has these weights.
    """
    wanted = recorded(config.content, STEERED_KEY)
    for member in members:
        is_model = member.role == "drafter" and not is_head(member.kind)
        if is_model and verifier_of(member, configs[member.name]).sha256 == wanted:
            return member
    raise UserError(
        "steering without its model",
        f"{name} in {config.path} steers weights {(wanted or '')[:8]}…, which no drafter has",
        "add the model that it was trained for as a drafter",
    )


def _shown(verifier: VerifierIdentity) -> str:
    made_from = f" (made from {verifier.made_from[:8]}…)" if verifier.made_from else ""
    return f"{verifier.name} {verifier.sha256[:8]}…{made_from}"
