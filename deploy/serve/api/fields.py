"""The base of what clients send: which fields are known, and which are refused by name."""

import json
import re
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import check_content

_NOT_TEXT = re.compile("[\0\ud800-\udfff]")


class Fields(BaseModel):
    """Base of what clients send. Null means that a field is not set."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    UNSUPPORTED: ClassVar[frozenset[str]] = frozenset()
    """Fields that others know; only null, or what asks for nothing, is taken."""
    ALIASES: ClassVar[frozenset[str]] = frozenset()
    """Names by which clients know fields that cannot bear them here."""
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    """Fields that others know and that change nothing here."""
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Of fields beside these, the values that change nothing."""

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kept: dict[str, Any] = {}
        is_unknown = False
        for name, value in given.items():
            if name in cls.model_fields or name in cls.ALIASES:
                if value is not None:
                    kept[name] = _encodable(name, value)
            elif name in cls.NEUTRAL:
                if value is not None and not any(
                    _equal(value, neutral) for neutral in cls.NEUTRAL[name]
                ):
                    raise Refused(name, f"{name} is not supported, except as {_shown(cls, name)}")
            elif name in cls.IGNORED:
                continue
            elif name in cls.UNSUPPORTED:
                if value is not None:
                    raise Refused(name, f"{name} is not supported by this server")
            elif not is_unknown:  # one is enough to refuse them all
                kept[name], is_unknown = value, True
        return kept


def _shallow(value: dict[str, Any]) -> dict[str, Any]:
    try:
        check_content(value, "value", "a field")
    except UserError as error:
        raise ValueError(f"{error.what}: {error.where}") from error
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_shallow)]
"""One that is not nested beyond what can be written again."""


class Refused(ValueError):
    """A field that is known and not supported, or a value that pydantic cannot judge."""

    def __init__(self, name: str, message: str, code: str = "unsupported_parameter") -> None:
        self.name, self.code = name, code
        super().__init__(message)


def _encodable(name: str, value: Any) -> Any:
    """Refuse half a surrogate pair, which JSON can spell and UTF-8 cannot, and NUL."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and (match := _NOT_TEXT.search(text)):
            what = "a NUL character" if match[0] == "\0" else "half a surrogate pair"
            message = f"{name} holds {what}, which is no text: leave it out"
            raise Refused(name, message, "invalid_value")
    return value


def _equal(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def _shown(fields: type[Fields], name: str) -> str:
    return " or ".join(json.dumps(value) for value in fields.NEUTRAL[name])
