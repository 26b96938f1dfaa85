"""The base of every settings model: frozen, unknown keys refused."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Base of all tunable fields. A field's description is its documentation everywhere."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
