"""What a dry run reads of a recipe's inputs that lie on this machine, and of the machine."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processor import num_cores, processor_name
from polybasic.chain.base.progress import waiting
from polybasic.chain.base.readable import counted
from polybasic.chain.formats.checkpoints.models import resolve_model
from polybasic.deploy.planner.prompts import read_questions
from polybasic.recipes.estimates.sizes import has_weights
from polybasic.recipes.pipeline.prompts import PromptSource, bench_prompts, plan_prompts
from polybasic.recipes.pipeline.running import PipelineStage
from polybasic.recipes.pipeline.sources import chat_template_of
from polybasic.recipes.schema.recipe import Recipe

NUM_FIRST = 20
"""Conversations that the chat template is tried on."""
READ_SECONDS = 20.0
"""After which the rows that were read stand for all."""


def known_lines(recipe: Recipe, stages: Sequence[PipelineStage]) -> Iterator[str]:
    """A line for each input: what was read of it, or that it is yet to be downloaded.

    Nothing is downloaded or written.

    Args:
        recipe: whose inputs `check_inputs` has found.
        stages: that would be run.

    Raises:
        UserError: the chat template is of no use, or refuses all of the first conversations;
            conversations or prompts are malformed, or there is no usable one among them.
    """
    names = {stage.name for stage in stages}
    first: list[Any] = []
    conversations = recipe.data.conversations
    if "data" in names:
        line, first = _conversations(conversations)
        yield line
    yield _chat_template(recipe, first)
    for name, source in (
        ("plan", plan_prompts(recipe.plan, conversations)),
        ("report", bench_prompts(recipe.bench, conversations)),
    ):
        if name in names:
            yield f"{source.key}: {_prompts(source)}"


def machine_line() -> str:
    """The processor at hand, its cores, and the CPU kernels that would be used."""
    from polybasic.chain.kernels.cpu.native import describe_kernels

    cores = counted(num_cores(), "core")
    return f"this machine: {processor_name()}, {cores}; CPU kernels: {describe_kernels()}"


def _conversations(named: str) -> tuple[str, list[Any]]:
    """What is told of them, and the messages of the first ones."""
    from polybasic.train.data.conversation_sources import HubData, is_cached, parse_source
    from polybasic.train.data.conversations import SkippedRow, read_rows

    source = parse_source(named)
    if isinstance(source, HubData) and not is_cached(source):
        return f"data.conversations: {named}, to be downloaded", []
    first: list[Any] = []
    reasons: Counter[str] = Counter()
    num_usable, which, ends = 0, "", time.monotonic() + READ_SECONDS
    with waiting("reading conversations"):
        for row in read_rows(named):
            if isinstance(row, SkippedRow):
                reasons[row.reason] += 1
            else:
                num_usable += 1
                first += [row["messages"]] if len(first) < NUM_FIRST else []
            if time.monotonic() > ends:
                which = "the first "
                break
    rows = f"{which}{counted(num_usable + reasons.total(), 'row')}"
    why = "".join(f", {num:,} skipped: {reason}" for reason, num in reasons.items())
    if not num_usable:
        raise UserError(
            f"no usable conversation in {rows}",
            f"data.conversations = {named}{why}",
            "give rows with at least one user turn that an assistant answers",
        )
    return f"data.conversations: {named}, {num_usable:,} of {rows} usable{why}", first


def _chat_template(recipe: Recipe, first: list[Any]) -> str:
    from polybasic.chain.formats.tokenizer import load_tokenizer
    from polybasic.train.data.chat import check_chat_template, encode_accepted

    given, named = chat_template_of(recipe), recipe.target.model
    whose = "the target's own" if given is None else "target.chat_template"
    if not has_weights(named):
        return f"chat template: {whose}, tried when {named} is downloaded"
    tokenizer = load_tokenizer(resolve_model(named, weights=False))
    if given is not None:
        tokenizer.chat_template = given
    check_chat_template(tokenizer)
    if not first:
        return f"chat template: {whose}, works"
    encoded, refusal = encode_accepted(tokenizer, first, recipe.data.max_tokens)
    if refusal is not None and not encoded:
        raise refusal
    longest = max(len(conversation.input_ids) for conversation in encoded)
    return (
        f"chat template: {whose}, takes {len(encoded)} of the first "
        f"{counted(len(first), 'conversation')}, the longest as {counted(longest, 'token')} "
        f"(data.max_tokens {recipe.data.max_tokens:,})"
    )


def _prompts(source: PromptSource) -> str:
    if source.is_shipped:
        return f"{source.shown}, {source.num_per_task} of each task"
    if source.file is None:
        what = "to be downloaded" if source.is_url else "first turns of held-out conversations"
        return f"{source.named}, {what}"
    questions = read_questions(Path(source.file))
    tasks = ", ".join(dict.fromkeys(question.task for question in questions))
    return f"{source.file}, {counted(len(questions), 'prompt')} ({tasks})"
