"""What an answer has to match, as OpenAI says it, and as vLLM does in two ways."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from polybasic.deploy.runtime.grammar import ANY_OBJECT, Grammar
from polybasic.deploy.serve.api.fields import Fields, Refused

_SCHEMA = "a schema: an object of JSON, true, or the text of either"
_LARK = "a grammar in Lark's syntax"
Restriction = tuple[str, Callable[[], Grammar]]
"""The field that restricts an answer, and what makes its grammar."""


class JsonSchemaFormat(Fields):
    """Of a response format."""

    name: str | None = Field(None, description="taken, and not used")
    description: str | None = Field(None, description="taken, and not used")
    schema_: Any = Field(ANY_OBJECT, alias="schema", description=_SCHEMA)
    strict: bool | None = Field(None, description="taken: answers hold to every schema")

    ALIASES = frozenset({"schema"})


class ResponseFormat(Fields):
    """OpenAI's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            message = "json_schema stands beside the type json_schema, and only there"
            raise Refused("json_schema", message, "invalid_value")
        return self

    @property
    def asked(self) -> Any:
        """The schema; None for any text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return ANY_OBJECT if self.type == "json_object" else None


class StructuredOutputs(Fields):
    """vLLM's."""

    json_: Any = Field(None, alias="json", description=_SCHEMA)
    regex: str | None = None
    choice: list[str] | None = Field(None, description="texts")
    grammar: str | None = Field(None, description=_LARK)
    json_object: bool = False

    ALIASES = frozenset({"json"})
    UNSUPPORTED = frozenset(
        """structural_tag disable_any_whitespace disable_additional_properties disable_fallback
        whitespace_pattern""".split()  # noqa: SIM905
    )


class Structured(Fields):
    """The fields of a request that restrict its answers, of which it may have one."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs = StructuredOutputs()
    guided_json: Any = Field(None, description=_SCHEMA)
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, description="texts")
    guided_grammar: str | None = Field(None, description=_LARK)

    MAKERS: ClassVar[dict[str, Callable[[Any], Grammar]]] = {
        "json": Grammar.json_schema,
        "regex": Grammar.regex,
        "choice": Grammar.choice,
        "grammar": Grammar.lark,
    }

    @model_validator(mode="after")
    def _restricts_once(self) -> "Structured":
        params = [param for param, _ in self._restrictions]
        if len(params) > 1:
            message = f"{params[0]} and {params[1]} both restrict the answer: give one of them"
            raise Refused(params[1], message, "invalid_value")
        return self

    @property
    def restriction(self) -> Restriction | None:
        """The field that restricts the answers, and what makes its grammar."""
        return next(iter(self._restrictions), None)

    @property
    def _restrictions(self) -> list[Restriction]:
        own = self.structured_outputs
        schema = None if self.response_format is None else self.response_format.asked
        values = {
            ("response_format", "json"): schema,
            ("structured_outputs.json_object", "json"): ANY_OBJECT if own.json_object else None,
            ("structured_outputs.json", "json"): own.json_,
        }
        for kind in self.MAKERS:
            values[f"guided_{kind}", kind] = getattr(self, f"guided_{kind}")
            if kind != "json":
                values[f"structured_outputs.{kind}", kind] = getattr(own, kind)
        return [
            (param, partial(self.MAKERS[kind], value))
            for (param, kind), value in values.items()
            if value is not None
        ]
