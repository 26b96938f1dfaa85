"""What a config.json records for this project alone; other engines ignore it."""

from typing import Any

ORIGIN_KEY = "polybasic"
"""The section of a config.json that holds the records."""
GGUF_KEY = "gguf"
"""Of the GGUF files that the weights were read from: their digests and types."""


def recorded(config: dict[str, Any], key: str) -> str | None:
    """What the content of a config.json records under `key`; None if it is no text."""
    origin = config.get(ORIGIN_KEY)
    value = origin.get(key) if isinstance(origin, dict) else None
    return value if isinstance(value, str) else None
