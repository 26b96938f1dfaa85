"""chain.json: what a chain consists of, where it came from and how it runs. No torch in here."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, model_validator

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.settings import Settings
from polybasic.chain.formats.checkpoints.kinds import MODEL_KINDS, Kind
from polybasic.chain.formats.files import read_json, sha256_of_object, write_json
from polybasic.chain.formats.plan import LosslessPlan, MeasuredPlan, Name, Plan, PlansByTemperature

SCHEMA = "polybasic.chain/3"
OLDER_SCHEMAS = ("polybasic.chain/1", "polybasic.chain/2")
"""That `polybasic migrate` brings to the present one (`polybasic.chain.formats.migration`)."""
MANIFEST_NAME = "chain.json"
DIGEST_KEY = "sha256"
"""Of chain.json: the digest of all else in it, which finds damage. Who edits a manifest by hand
removes it."""

Role = Literal["target", "intermediate", "drafter"]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]

_KINDS_OF_ROLE: dict[Role, tuple[str, ...]] = {
    "target": MODEL_KINDS,
    "intermediate": MODEL_KINDS,
}
"""Drafters are of all kinds."""


class Reference(Settings):
    """Where a member lies: inside the chain (`path`), or outside of it (`source`)."""

    path: str | None = Field(default=None, description="folder inside the chain, relative to it")
    source: str | None = Field(
        default=None,
        description="hub id, absolute folder, or a folder relative to the chain ('./x', '../x'); "
        "beside a path it only tells where the copy came from",
    )
    revision: str | None = Field(default=None, description="commit, tag or branch of a hub id")

    @model_validator(mode="after")
    def _lies_somewhere(self) -> "Reference":
        if self.path is None and self.source is None:
            raise ValueError("needs a path or a source")
        if self.revision is not None and self.source is None:
            raise ValueError("a revision needs a source")
        return self


GGML_GROUP = 32
"""Inputs of a weight that share a scale in GGML's types of 4 bits."""
_IN_4_BITS = ("Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS")
_FLOATS = ("F32", "F16", "BF16")


class GGUFOrigin(Settings):
    """The GGUF files that a member's weights were read from."""

    files: dict[str, Sha256] = Field(min_length=1, description="file name -> sha256")
    types: dict[str, int] = Field(description="of its tensors, as GGML names them -> how many")

    @property
    def in_4_bits(self) -> bool:
        """Whether most of its quantized tensors have codes of 4 bits; all such types have groups
        of `GGML_GROUP` inputs."""
        num = {name: num for name, num in self.types.items() if name not in _FLOATS}
        return 2 * sum(num.get(name, 0) for name in _IN_4_BITS) > sum(num.values())


class Member(Settings):
    """One model of the chain."""

    name: Name
    role: Role
    kind: Kind
    reference: Reference
    dtype: str = Field(description="of most of its weight bytes; 'int4' for AWQ")
    num_parameters: int = Field(ge=0, description="packed 4-bit weights count one each")
    num_bytes: int = Field(ge=0, description="of its weight files")
    files: dict[str, Sha256] = Field(min_length=1, description="file name -> sha256")
    group_size: int | None = Field(
        default=None, description="of kind awq: inputs of a weight that share a scale"
    )
    gguf: GGUFOrigin | None = Field(
        default=None, description="of weights that were read from GGUF, or are a copy of such"
    )
    is_copy: bool = Field(
        default=False, description="whether its weights were rounded to 4 bits from others"
    )
    drafts_for: tuple[Name, ...] = Field(
        default=(), description="of a drafter: the verifying members that it can draft for"
    )

    @property
    def repeats_codes(self) -> bool:
        """Whether it is a 4-bit copy that can hold the very codes of the file it was made of: in
        groups that are not larger than those of the file, which has 4 bits too."""
        is_as_fine = self.group_size is not None and self.group_size <= GGML_GROUP
        return is_as_fine and self.gguf is not None and self.gguf.in_4_bits

    @model_validator(mode="after")
    def _kind_fits_role(self) -> "Member":
        kinds = _KINDS_OF_ROLE.get(self.role)
        if kinds is not None and self.kind not in kinds:
            raise ValueError(f"kind of the {self.role} must be {' or '.join(kinds)}")
        if (self.role == "drafter") != bool(self.drafts_for):
            raise ValueError("drafts_for names verifying members for a drafter, and for no other")
        return self


class TokenizerFiles(Settings):
    """The tokenizer, always inside the chain."""

    path: str
    files: dict[str, Sha256] = Field(min_length=1, description="file name -> sha256")


class Provenance(Settings):
    """How the chain was made."""

    recipe: dict[str, Any] = Field(description="the resolved recipe")
    command: str
    git_commit: str | None = None
    package_versions: dict[str, str]
    data_digests: dict[str, Sha256] = Field(description="data source -> sha256")


class Manifest(Settings):
    """The content of chain.json beside its schema version."""

    members: tuple[Member, ...] = Field(min_length=1, description="from the target down")
    tokenizer: TokenizerFiles
    plan: LosslessPlan = Field(description="runs where `plans` has none for the machine")
    plans: tuple[MeasuredPlan, ...] = Field(default=(), description="one for each machine and link")
    provenance: Provenance
    quality: dict[Name, dict[str, Any]] = Field(
        default={}, description="of intermediates, against the model that they were made from"
    )
    training: dict[Name, dict[str, Any]] = Field(
        default={}, description="of draft heads, in numbers"
    )
    grown: str | None = Field(
        default=None,
        description="shape that a smaller chain was grown to: acceptance is the smaller one's, "
        "time the shape's",
    )
    results: dict[str, Any] | None = Field(default=None, description="of the last report")

    @model_validator(mode="after")
    def _members_are_in_order(self) -> "Manifest":
        names = [member.name for member in self.members]
        if len(set(names)) < len(names):
            raise ValueError(f"member names repeat: {', '.join(names)}")
        roles = [member.role for member in self.members]
        order = sorted(roles, key=("target", "intermediate", "drafter").index)
        if roles != order or roles.count("target") != 1:
            raise ValueError(
                f"members must be one target, then intermediates, then drafters, not "
                f"{', '.join(roles)}"
            )
        return self

    @model_validator(mode="after")
    def _drafters_have_verifiers(self) -> "Manifest":
        for drafter in self.drafters:
            for name in drafter.drafts_for:
                if name not in {member.name for member in self.verifying}:
                    raise ValueError(f"{drafter.name} drafts for {name}, which is no member")
        return self

    @model_validator(mode="after")
    def _plans_can_run(self) -> "Manifest":
        check_plan(self.plan, self.members)
        for measured in self.plans:
            for plan in measured.all_plans:
                check_plan(plan, self.members)
        return self

    @property
    def verifying(self) -> tuple[Member, ...]:
        """Target and intermediates, from the target down."""
        return tuple(member for member in self.members if member.role != "drafter")

    @property
    def drafters(self) -> tuple[Member, ...]:
        """Members that draft."""
        return tuple(member for member in self.members if member.role == "drafter")

    def plans_for(self, hardware: str, dtype: str) -> PlansByTemperature:
        """What was measured on this kind of machine in this dtype, for all members on it."""
        here = (plan for plan in self.plans if plan.conditions[:3] == (hardware, None, dtype))
        return PlansByTemperature(tuple(sorted(here, key=lambda plan: plan.temperature)))

    def lacks(self, hardware: str, dtype: str, temperature: float | None = None) -> str | None:
        """Why no plan was measured for this machine, for people; None where one was.

        Args:
            temperature: None for any.
        """
        plans = [plan for plan in self.plans if plan.link is None]
        if not plans:
            return "no plan of the chain was measured yet"
        asked = {"on": hardware, "in": dtype}
        if temperature is not None:
            asked["at temperature"] = f"{temperature:g}"
        for place, (name, wanted) in enumerate(asked.items()):
            found = [(plan.hardware, plan.dtype, f"{plan.temperature:g}")[place] for plan in plans]
            if wanted not in found:
                others = " and ".join(dict.fromkeys(found))
                return f"the chain's plans were measured {name} {others}, not {name} {wanted}"
            plans = [plan for plan, value in zip(plans, found, strict=True) if value == wanted]
        return None

    def member(self, name: str) -> Member:
        """The member of this name; KeyError if there is none."""
        return {member.name: member for member in self.members}[name]


def check_plan(plan: Plan, members: Sequence[Member]) -> None:
    """Check that a plan names members of a chain in an order in which they can run.

    Raises:
        ValueError: unknown or misplaced members, a drafter that does not draft for the innermost
            verifying one, no block length for a verifying one, or a window for the target.
    """
    by_name = {member.name: member for member in members}
    if plan.members != tuple(name for name in by_name if name in plan.members):
        raise ValueError(
            f"plan.members {', '.join(plan.members)} must be among {', '.join(by_name)}, in that "
            "order"
        )
    verifying = [name for name in plan.members if by_name[name].role != "drafter"]
    drafters = plan.members[len(verifying) :]
    if verifying[:1] != [members[0].name]:
        raise ValueError(f"plan.members must begin with {members[0].name}")
    if len(drafters) > 1:
        raise ValueError(f"plan.members has {len(drafters)} drafters, {', '.join(drafters)}")
    for name in drafters:
        if verifying[-1] not in by_name[name].drafts_for:
            raise ValueError(
                f"{name} drafts for {', '.join(by_name[name].drafts_for)}, not for {verifying[-1]}"
            )
    for name in verifying[:-1]:
        if name not in plan.flush:
            raise ValueError(f"plan.flush lacks {name}, above {verifying[-1]}")
    for name in plan.flush:
        if name not in by_name or by_name[name].role == "drafter":
            raise ValueError(f"plan.flush names {name}, which verifies nothing")
    if plan.lossy is not None and len(verifying) != 2:
        raise ValueError(
            f"plan.lossy needs the target and one member that proposes blocks, not "
            f"{', '.join(verifying)}"
        )
    for name in plan.windows:
        if name not in by_name:
            raise ValueError(f"plan.windows names {name}, which is no member")
        if name == members[0].name:
            raise ValueError(f"plan.windows names {name}, whose distribution is kept: it sees all")


def read_content(folder: Path) -> dict[str, Any]:
    """The JSON of `folder`/chain.json, with a schema of any known version.

    Raises:
        UserError: the folder is no chain; the manifest is no JSON, or of an unknown version.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        found = f"no {MANIFEST_NAME} in it" if folder.is_dir() else "no such folder"
        raise UserError(
            "not a chain", f"{folder} ({found})", "name a folder that `polybasic package` wrote"
        )
    content = read_json(path, "manifest")
    if not isinstance(content, dict):
        raise UserError(
            "malformed manifest", f"{path} holds no JSON object", "package the chain again"
        )
    if "schema" not in content:
        raise UserError(
            "manifest without version", f"no schema in {path}", f'expected "schema": "{SCHEMA}"'
        )
    if (schema := content["schema"]) not in (SCHEMA, *OLDER_SCHEMAS):
        raise _unknown_version(schema, content, path)
    return content


def read_manifest(folder: Path) -> Manifest:
    """Read `folder`/chain.json.

    Raises:
        UserError: as `read_content`; the manifest is of an older version, not what was written,
            or malformed (the JSON location is named).
    """
    path, content = folder / MANIFEST_NAME, read_content(folder)
    if (schema := content.pop("schema")) != SCHEMA:
        raise UserError(
            "manifest of an older version",
            f"schema = {schema!r} in {path}, this polybasic reads {SCHEMA}",
            f"run `polybasic migrate {shlex.quote(str(folder))}` once",
        )
    expected = content.pop(DIGEST_KEY, None)
    if expected is not None and (found := sha256_of_object(content)) != expected:
        raise UserError(
            "manifest is not what was written",
            f"{path} (content {found[:8]}…, {DIGEST_KEY} {str(expected)[:8]}…)",
            f"fetch it anew; if you have edited it, remove {DIGEST_KEY} from it",
        )
    return validated_manifest(content, path)


def validated_manifest(content: Any, path: Path) -> Manifest:
    """The manifest of JSON content without schema and digest.

    Args:
        path: that errors name.

    Raises:
        UserError: it is malformed (the JSON location is named).
    """
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise _first_fault(error, path) from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `folder`/chain.json, whole.

    Raises:
        UserError: the disk is full or not writable.
    """
    content = manifest.model_dump(mode="json")
    write_json(
        folder / MANIFEST_NAME, {"schema": SCHEMA, DIGEST_KEY: sha256_of_object(content), **content}
    )


def _unknown_version(schema: Any, content: dict[str, Any], path: Path) -> UserError:
    """Of a newer schema, with the version of polybasic that it needs; or of none that is known."""
    where = f"schema = {schema!r:.60} in {path}"
    family, _, number = SCHEMA.rpartition("/")
    found = re.fullmatch(rf"{re.escape(family)}/(\d{{1,4}})", str(schema))
    if found is None or int(found[1]) <= int(number):
        return UserError("unknown manifest version", where, "name a chain that polybasic wrote")
    made = content.get("provenance")
    versions = made.get("package_versions") if isinstance(made, dict) else None
    writer = versions.get("polybasic") if isinstance(versions, dict) else None
    needed = f"{writer:.40} or newer" if isinstance(writer, str) else "of a later version"
    return UserError(
        "manifest of a newer version",
        where,
        f"install polybasic {needed}, which reads {schema}: this one reads {SCHEMA}",
    )


def _first_fault(error: ValidationError, path: Path) -> UserError:
    fault = error.errors()[0]
    location = _json_location(fault["loc"])
    if fault["type"] == "extra_forbidden":
        return UserError("unknown key", f"{location} in {path}", "remove it or package again")
    if fault["type"] == "missing":
        return UserError("missing key", f"{location} in {path}", "package the chain again")
    message = fault["msg"].removeprefix("Value error, ")
    value = repr(fault["input"])
    shown = f"{location} = {value}" if len(value) <= 80 else location
    return UserError(
        "malformed manifest", f"{shown} in {path} ({message})", "package the chain again"
    )


def _json_location(parts: tuple[int | str, ...]) -> str:
    """("members", 0, "dtype") -> "members[0].dtype"."""
    location = ""
    for part in parts:
        location += f"[{part}]" if isinstance(part, int) else f".{part}" if location else part
    return location or "the whole"
