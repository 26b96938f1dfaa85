"""What each stage costs: parameters, peak memory, bytes written and seconds, from counts.

The speeds were measured on two AVX-512 cores with the shipped recipe; other machines differ.
"""

from dataclasses import dataclass

from polybasic.recipes.pipeline import StageState
from polybasic.recipes.schema import Recipe
from polybasic.recipes.sizes import Shape

FLOPS = 2.5e11
"""Operations a second of training, of the 4-bit search and of evaluations."""
READ_BYTES_PER_SECOND = 27e9
"""Weights that a decoding pass reads."""
LAYER_SECONDS = 0.15e-3
"""What a decoder layer costs a token beside that, averaged over the systems of a report."""

_CONVERSATION_BYTES = 620
_CONVERSATION_TOKENS = 115
_PROCESS_BYTES = 700e6
_SEARCH_PASSES = 8
"""AWQ's grid of scales and clips, in forward passes over the calibration tokens."""
_ADAM_BYTES = 16
"""Of one trained parameter: float32 weight, gradient and two moments."""


@dataclass(frozen=True)
class StageEstimate:
    """What a stage needs if it runs."""

    name: str
    state: StageState
    num_parameters: int
    memory_bytes: float
    disk_bytes: float
    seconds: float


def estimate_stage(name: str, state: StageState, recipe: Recipe, shape: Shape) -> StageEstimate:
    """The estimate of one stage of the pipeline."""
    num_parameters, memory_bytes, disk_bytes, seconds = _ESTIMATORS[name](recipe, shape)
    return StageEstimate(
        name, state, num_parameters, _PROCESS_BYTES + memory_bytes, disk_bytes, seconds
    )


_Costs = tuple[int, float, float, float]


def _data(recipe: Recipe, shape: Shape) -> _Costs:
    is_embedded = recipe.data.conversations == "embedded"
    num = recipe.target.scratch.num_embedded_conversations if is_embedded else 0
    return 0, 4.0 * num * _CONVERSATION_BYTES, 1.0 * num * _CONVERSATION_BYTES, 1 + num * 1e-4


def _target(recipe: Recipe, shape: Shape) -> _Costs:
    num = shape.num_parameters
    if recipe.target.model != "scratch":
        return num, 0, 0, 0
    scratch = recipe.target.scratch
    activations = (
        4
        * scratch.batch_tokens
        * (30 * shape.num_layers * shape.hidden_size + 3 * shape.vocab_size)
    )
    operations = 6 * num * scratch.num_steps * scratch.batch_tokens
    return num, num * _ADAM_BYTES + activations, num * 14, 10 + operations / FLOPS


def _draft(recipe: Recipe, shape: Shape) -> _Costs:
    train, num = recipe.train, shape.num_draft_parameters
    step_tokens = train.batch_size * _row_tokens(recipe)
    logits = train.batch_size * recipe.data.max_tokens * shape.vocab_size * 4
    step_operations = step_tokens * (
        2 * shape.num_parameters
        + train.unroll_steps * (6 * num + 4 * shape.num_embedding_parameters)
    )
    evaluation_operations = (
        recipe.data.num_heldout
        * train.eval_answer_tokens
        * train.eval_tree_depth
        * train.eval_tree_top_k
        * 2
        * (num + shape.num_embedding_parameters)
    )
    num_evaluations = 1 + train.num_steps // train.eval_every_steps
    operations = train.num_steps * step_operations + num_evaluations * evaluation_operations
    memory = shape.num_bytes + num * _ADAM_BYTES + 4 * logits
    disk = shape.num_draft_bytes + num * 2 * _ADAM_BYTES
    return num, memory, disk, 15 + operations / FLOPS


def _intermediate(recipe: Recipe, shape: Shape) -> _Costs:
    quantize = recipe.quantize
    tokens = quantize.num_calibration_samples * quantize.calibration_tokens
    operations = (
        2 * shape.num_parameters * (tokens * _SEARCH_PASSES + 2 * quantize.num_quality_tokens)
    )
    memory = 3 * shape.num_bytes + 40 * tokens * shape.hidden_size
    seconds = 5 + operations / FLOPS
    return shape.num_parameters, memory, shape.num_int4_bytes, seconds


def _chain(recipe: Recipe, shape: Shape) -> _Costs:
    disk = shape.num_int4_bytes + shape.num_draft_bytes
    if recipe.package.copy_target:
        disk += shape.num_bytes
    return 0, 0, disk, 1 + 2 * disk / 1e9


def _report(recipe: Recipe, shape: Shape) -> _Costs:
    bench = recipe.bench
    tokens = 6 * bench.num_prompts_per_task * bench.max_new_tokens
    token_seconds = shape.num_bytes / READ_BYTES_PER_SECOND + shape.num_layers * LAYER_SECONDS
    memory = shape.num_bytes + shape.num_int4_bytes + shape.num_draft_bytes
    seconds = 20 + tokens * token_seconds * len(bench.systems) * bench.repeats
    return 0, memory * 1.5, 1e6, seconds


_ESTIMATORS = {
    "data": _data,
    "target": _target,
    "draft": _draft,
    "intermediate": _intermediate,
    "chain": _chain,
    "report": _report,
}


def _row_tokens(recipe: Recipe) -> float:
    return min(recipe.data.max_tokens, _CONVERSATION_TOKENS)
