"""chain.json: what a chain consists of, where it came from and how it runs. No torch in here."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, model_validator

from polybasic.chain.errors import UserError
from polybasic.chain.files import read_json, write_json
from polybasic.chain.settings import Settings

SCHEMA = "polybasic.chain/1"
MANIFEST_NAME = "chain.json"

Role = Literal["target", "intermediate", "drafter"]
Kind = Literal["decoder", "awq", "eagle2"]
Rule = Literal["block", "token"]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]

_KINDS_OF_ROLE: dict[Role, tuple[Kind, ...]] = {
    "target": ("decoder",),
    "intermediate": ("awq", "decoder"),
    "drafter": ("eagle2",),
}


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

    @model_validator(mode="after")
    def _kind_fits_role(self) -> "Member":
        kinds = _KINDS_OF_ROLE[self.role]
        if self.kind not in kinds:
            raise ValueError(f"kind of a {self.role} must be {' or '.join(kinds)}")
        return self


class TokenizerFiles(Settings):
    """The tokenizer, always inside the chain."""

    path: str
    files: dict[str, Sha256] = Field(min_length=1, description="file name -> sha256")


class Tree(Settings):
    """Shape of the draft tree."""

    depth: int = Field(ge=1, description="draft passes a round")
    top_k: int = Field(ge=1, description="beams kept and children a beam, at each depth")
    rows: int = Field(ge=2, description="rows of the verification pass, root included")


class Plan(Settings):
    """Which members run and how."""

    members: tuple[Name, ...] = Field(min_length=1, description="names from the target down")
    tree: Tree
    flush_length: int = Field(
        ge=1, description="tokens the intermediate collects before the target is asked"
    )
    rule: Rule = Field(default="block", description="verification of a block")


class Provenance(Settings):
    """How the chain was made."""

    recipe: dict[str, Any] = Field(description="the resolved recipe")
    command: str
    git_commit: str | None = None
    package_versions: dict[str, str]
    data_digests: dict[str, Sha256] = Field(description="data source -> sha256")


class Manifest(Settings):
    """The content of chain.json beside its schema version."""

    members: tuple[Member, ...] = Field(min_length=2, description="from the target down")
    tokenizer: TokenizerFiles
    plan: Plan
    provenance: Provenance
    quality: dict[str, Any] | None = Field(default=None, description="intermediate against target")
    training: dict[str, Any] | None = Field(default=None, description="of the head, in numbers")
    results: dict[str, Any] | None = Field(default=None, description="the last report.json")

    @model_validator(mode="after")
    def _members_are_in_order(self) -> "Manifest":
        names = [member.name for member in self.members]
        if len(set(names)) < len(names):
            raise ValueError(f"member names repeat: {', '.join(names)}")
        expected = ["target", *["intermediate"] * (len(names) - 2), "drafter"]
        roles = [member.role for member in self.members]
        if roles != expected:
            raise ValueError(
                f"members must go from the target over intermediates to the drafter, not "
                f"{', '.join(roles)}"
            )
        return self

    @model_validator(mode="after")
    def _plan_names_members(self) -> "Manifest":
        planned, names = self.plan.members, [member.name for member in self.members]
        if planned != tuple(name for name in names if name in planned):
            raise ValueError(
                f"plan.members {', '.join(planned)} must be among {', '.join(names)}, in that order"
            )
        if planned[0] != names[0] or (len(planned) > 1 and planned[-1] != names[-1]):
            raise ValueError(
                f"plan.members must begin with {names[0]} and, unless alone, end with {names[-1]}"
            )
        return self

    def member(self, name: str) -> Member:
        """The member of this name; KeyError if there is none."""
        return {member.name: member for member in self.members}[name]


def read_manifest(folder: Path) -> Manifest:
    """Read `folder`/chain.json.

    Raises:
        UserError: the folder is no chain; the manifest is no JSON, of another version, or
            malformed (the JSON location is named).
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
    if (schema := content.pop("schema")) != SCHEMA:
        raise UserError(
            "unknown manifest version",
            f"schema = {schema!r} in {path}",
            f"this polybasic reads {SCHEMA}: install the one that wrote it, or package again",
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise _first_fault(error, path) from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `folder`/chain.json, whole.

    Raises:
        UserError: the disk is full or not writable.
    """
    write_json(folder / MANIFEST_NAME, {"schema": SCHEMA, **manifest.model_dump(mode="json")})


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
