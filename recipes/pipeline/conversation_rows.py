"""The recipe's conversations as stages take them: split, fitted to the tokenizer, encoded."""

import sys
from random import Random
from typing import Any

from polybasic.recipes.pipeline.running import Workspace
from polybasic.recipes.pipeline.sources import (
    REGENERATED,
    answers_of,
    tokenizer_identity,
    tokenizer_of,
)
from polybasic.recipes.schema.recipe import Recipe

_MOST_ENCODED = 16_384
"""Conversations that are enough to calibrate and to distil on, whatever the recipe has."""


def conversation_stages(recipe: Recipe, source: str) -> tuple[str, ...]:
    """Stages that must be whole before a model of stage `source` is learned from conversations.

    The chain's tokenizer is the target's.
    """
    stages = ["data", "target"]
    stages += [REGENERATED] if recipe.data.regenerate is not None else []
    stages += [source] if source != "target" else []
    return tuple(stages)


def learned_from(workspace: Workspace, source: str) -> dict[str, Any]:
    """What a stage depends on that learns from conversations cut to `data.max_tokens`.

    Args:
        workspace: the run.
        source: the stage that gave the model.
    """
    recipe = workspace.recipe
    inputs = {
        "seed": recipe.seed,
        "conversations": workspace.identity("data")["conversations"],
        "data": recipe.data.decisive(),
        source: workspace.identity(source),
    }
    if recipe.data.regenerate is not None:
        inputs["answers"] = workspace.identity(REGENERATED)
    # the target's identity holds its tokenizer already
    return inputs if source == "target" else {**inputs, "tokenizer": tokenizer_identity(workspace)}


def encoded_rows(workspace: Workspace) -> tuple[list[list[int]], list[list[int]]]:
    """(training, held-out) token ids by the chain's tokenizer, of what 4-bit copies learn.

    All of `conversation_stages` must be whole. Conversations that the chat template refuses are
    left out, and counted on stderr.

    Raises:
        UserError: no chat template, or one that refuses all of them.
    """
    from polybasic.chain.formats.tokenizer import load_tokenizer
    from polybasic.train.data.conversations import (
        fit_to_template,
        load_conversations,
        split_conversations,
    )

    recipe = workspace.recipe
    tokenizer = load_tokenizer(tokenizer_of(workspace))
    rows = load_conversations(answers_of(workspace), recipe.data.limit)
    training, heldout = split_conversations(rows, recipe.data.num_heldout)
    if len(training) > _MOST_ENCODED:
        training = training.select(Random(recipe.seed).sample(range(len(training)), _MOST_ENCODED))
    encoded = [
        _encoded(tokenizer, fit_to_template(rows, tokenizer), recipe.data.max_tokens)
        for rows in (training, heldout)
    ]
    return encoded[0], encoded[1]


def _encoded(tokenizer: Any, rows: Any, max_tokens: int) -> list[list[int]]:
    from polybasic.train.data.chat import encode_accepted

    encoded, refusal = encode_accepted(tokenizer, rows["messages"], max_tokens)
    if refusal is not None:
        if not encoded:
            raise refusal
        print(
            f"left out {len(rows) - len(encoded):,} of {len(rows):,} conversations that the chat "
            f"template refuses, the last: {refusal}",
            file=sys.stderr,
        )
    return [conversation.input_ids for conversation in encoded]
