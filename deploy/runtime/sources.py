"""Prompts of encoder-decoders: a source, then the token that the decoder starts from.

What the decoder has before its answer is a part of the prompt: tokens after the start token are a
beginning that the answer goes on from.
"""

from collections.abc import Mapping, Sequence

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.decoder_config import EncoderConfig
from polybasic.chain.kernels.torch.encoder_decoder import source_length
from polybasic.deploy.runtime.request import Request


def text_of(messages: Sequence[Mapping[str, object]]) -> str:
    """What an encoder reads of messages: it knows no roles, so they are their contents alone."""
    return "\n\n".join(str(message["content"]) for message in messages)


def with_start(token_ids: list[int], encoder: EncoderConfig) -> list[int]:
    """The prompt of a source.

    Raises:
        UserError: the source contains the token that would end it.
    """
    start = encoder.start_token_id
    if start in token_ids:
        raise UserError(
            "text spells the token that ends a source",
            f"token {token_ids.index(start) + 1} of the prompt, id {start}",
            "leave it out of the text",
        )
    return [*token_ids, start]


def check_source(request: Request, encoder: EncoderConfig) -> None:
    """Check what a request asks of an encoder-decoder.

    Raises:
        UserError: no source or no start token, or what has no meaning over a source.
    """
    token_ids, start = request.token_ids, encoder.start_token_id
    num_source = source_length(token_ids, start)
    if num_source in (0, len(token_ids)):
        raise UserError(
            "no source and start token",
            f"{len(token_ids)} prompt tokens, the start token is {start}",
            "give the source's tokens, then this one, as chain.encode returns them",
        )
    penalty = request.sampling.repetition_penalty
    asked = {
        "windows of the plan": bool(request.plan.windows),
        "prompt_logprobs": request.prompt_logprobs is not None,
        f"repetition_penalty={penalty:g}": penalty != 1,
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise UserError("unsupported over an encoder's source", what, "leave it out")
