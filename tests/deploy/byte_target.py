"""A small target whose tokens are bytes, so that it can spell anything."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken

from tests.checkpoints import byte_level_tokenizer
from tests.conftest import write_target


def write_byte_target(folder: Path, marks: Sequence[str] = ()) -> None:
    """Random weights, with vectors for some more tokens than the tokenizer has.

    Args:
        marks: further control tokens.
    """
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks])
    shape = {"vocab_size": len(tokenizer) + 5, "max_position_embeddings": 1024}
    write_target(folder, **shape, eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(folder)
