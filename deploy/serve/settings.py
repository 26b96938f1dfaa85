"""How a chain is served: the settings of `polybasic serve`."""

from typing import Literal

from pydantic import Field

from polybasic.chain.base.settings import Count, Factor, Settings, Whole


class ServeSettings(Settings):
    """What a server takes and how long it waits."""

    model_names: tuple[str, ...] = Field(
        min_length=1, description="that requests may name; answers carry the first"
    )
    api_keys: tuple[str, ...] = Field((), description="one of them is needed; none: all may ask")
    sequences: Count = Field(16, description="answers that are made at a time")
    queue: Whole = Field(256, description="answers that may wait")
    queued_tokens: Whole = Field(262_144, description="of the prompts that may wait")
    request_seconds: Factor = Field(600, description="of a request, waiting included")
    body_bytes: Count = Field(4 << 20, description="of a request's body at most")
    buffer_bytes: Count = Field(
        32 << 20, description="of bodies over 64 KiB at a time, room for two at least"
    )
    body_seconds: Factor = Field(20, description="in which a body has to arrive")
    allowed_hosts: tuple[str, ...] = Field(
        (), description="names that requests may call this server by; none: any"
    )
    special_tokens: bool = Field(
        False, description="contents of messages may spell the tokenizer's control tokens"
    )
    history: bool = Field(
        True, description="what was said to a key before is copied from: drafts alone, so no text"
    )
    allowed_origins: tuple[str, ...] = Field((), description="of pages elsewhere that may ask")
    page: bool = Field(True, description="serve the chat page at /")
    log_format: Literal["json", "text"] = Field("text", description="of the log's lines")

    @property
    def room_bytes(self) -> int:
        """Of bodies over 64 KiB at a time: half of it, a client's, has room for one."""
        return max(self.buffer_bytes, 2 * self.body_bytes)
