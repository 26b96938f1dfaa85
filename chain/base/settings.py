"""The base of every settings model, and the numbers that settings are made of."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.readable import readable_value


class Settings(BaseModel):
    """Base of all tunable fields. A field's description is its documentation everywhere."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            raise ValueError("text must not hold NUL or half a surrogate pair")
        return value


Model = TypeVar("Model", bound=Settings)


def _no_truth_value(value: Any) -> Any:
    """Refuse true and false, which Python counts as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("a number is expected, not true or false")
    return value


_Integer = Annotated[int, BeforeValidator(_no_truth_value), Field(ge=0)]
Whole = Annotated[_Integer, Field(le=10**9)]
"""Of things, possibly none."""
Count = Annotated[Whole, Field(ge=1)]
"""Of things: steps, tokens, prompts."""
Size = Annotated[Count, Field(le=1 << 20)]
"""Of one dimension of a model's tensors."""
Seed = Annotated[_Integer, Field(lt=2**32)]
_Number = Annotated[float, BeforeValidator(_no_truth_value), Field(ge=0)]
Weight = Annotated[_Number, Field(le=1e6)]
"""Of a part of a sum, or a rate; 0 leaves it out."""
Factor = Annotated[float, BeforeValidator(_no_truth_value), Field(gt=0, le=1e6)]
"""A weight that leaves nothing out."""
Share = Annotated[Weight, Field(le=1)]
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e30
"""Of draws that are not greedy; between them float32 logits stay finite."""


def _is_greedy_or_drawn(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"use 0 for greedy, or {MIN_TEMPERATURE} or more")
    return temperature


Temperature = Annotated[_Number, Field(le=MAX_TEMPERATURE), AfterValidator(_is_greedy_or_drawn)]


def arguments(model: type[Model], given: Mapping[str, Any]) -> Model:
    """The keyword arguments of a call, checked.

    Args:
        model: their names and types; a description says what is to be given.

    Raises:
        UserError: one of another type or out of range.
        TypeError: an unknown one.
    """
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        # of a union's alternatives, the one that came furthest says most
        fault = max(error.errors(include_url=False), key=lambda detail: len(detail["loc"]))
        name = str(fault["loc"][0])
        if name not in model.model_fields:
            raise unknown_argument(name, model.model_fields) from error
        shown = readable_value(given[name])
        if fault["type"] == "value_error":
            shown += f" ({fault['ctx']['error']})"
        do = f"give {model.model_fields[name].description}"
        raise UserError("argument not allowed", f"{name}={shown}", do) from error


def unknown_argument(name: str, known: Iterable[str]) -> TypeError:
    """What to raise where a keyword argument has none of the known names."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    do = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    return TypeError(f"unknown argument: {name}; {do}")
