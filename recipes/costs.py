"""What each stage costs: parameters, peak memory, bytes written and seconds, from counts.

The speeds were measured on two AVX-512 cores with the shipped recipe; other machines differ.
"""

from dataclasses import dataclass

from polybasic.recipes.pipeline import StageState
from polybasic.recipes.schema import Recipe
from polybasic.recipes.sizes import Shape
from polybasic.train.settings import ScratchModelSettings

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


@dataclass(frozen=True)
class Shapes:
    """Of the models that a recipe starts from; it may have no smaller one."""

    target: Shape
    small: Shape | None


def estimate_stage(name: str, state: StageState, recipe: Recipe, shapes: Shapes) -> StageEstimate:
    """The estimate of one stage of the pipeline."""
    num_parameters, memory_bytes, disk_bytes, seconds = _costs(name, recipe, shapes)
    return StageEstimate(
        name, state, num_parameters, _PROCESS_BYTES + memory_bytes, disk_bytes, seconds
    )


_Costs = tuple[int, float, float, float]


def _costs(name: str, recipe: Recipe, shapes: Shapes) -> _Costs:
    target, small = shapes.target, shapes.small
    match name:
        case "data":
            return _data(recipe)
        case "target":
            is_scratch = recipe.target.model == "scratch"
            return _source(target, recipe.target.scratch if is_scratch else None)
        case "draft":
            return _draft(recipe, target)
        case "intermediate":
            return _quantized(recipe, target)
        case "chain":
            return _chain(recipe, shapes)
        case "plan":
            return _plan(recipe, shapes)
        case "report":
            return _report(recipe, shapes)
    assert small is not None, f"stage {name} without section small"
    assert recipe.small is not None
    match name:
        case "small_target":
            is_scratch = recipe.small.model == "scratch"
            return _source(small, recipe.small.scratch if is_scratch else None)
        case "small":
            return _quantized(recipe, small)
        case "small_draft":
            return _draft(recipe, small)
    raise AssertionError(f"no estimate for stage {name}")


def _data(recipe: Recipe) -> _Costs:
    is_embedded = recipe.data.conversations == "embedded"
    num = recipe.target.scratch.num_embedded_conversations if is_embedded else 0
    return 0, 4.0 * num * _CONVERSATION_BYTES, 1.0 * num * _CONVERSATION_BYTES, 1 + num * 1e-4


def _source(shape: Shape, scratch: ScratchModelSettings | None) -> _Costs:
    """A model that is trained, or taken as it is."""
    num = shape.num_parameters
    if scratch is None:
        return num, 0, 0, 0
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


def _quantized(recipe: Recipe, shape: Shape) -> _Costs:
    quantize = recipe.quantize
    tokens = quantize.num_calibration_samples * quantize.calibration_tokens
    operations = (
        2 * shape.num_parameters * (tokens * _SEARCH_PASSES + 2 * quantize.num_quality_tokens)
    )
    memory = 3 * shape.num_bytes + 40 * tokens * shape.hidden_size
    seconds = 5 + operations / FLOPS
    return shape.num_parameters, memory, shape.num_int4_bytes, seconds


def _chain(recipe: Recipe, shapes: Shapes) -> _Costs:
    disk = float(_packed_bytes(recipe, shapes))
    if recipe.package.copy_target:
        disk += shapes.target.num_bytes
    return 0, 0, disk, 1 + 2 * disk / 1e9


def _plan(recipe: Recipe, shapes: Shapes) -> _Costs:
    plan = recipe.plan
    answers = 6 * plan.num_prompts_per_task
    # Each position is drafted for once a top_k; each shape is timed on an answer, twice.
    drafts = answers * plan.max_new_tokens * len(plan.grid.top_ks)
    timed = 2 * (3 * len(plan.grid.top_ks) + len(plan.grid.rows)) * plan.max_new_tokens
    tokens = answers * plan.max_new_tokens + drafts + timed
    memory = shapes.target.num_bytes + _packed_bytes(recipe, shapes)
    return 0, memory * 1.5, 1e7, 20 + tokens * _token_seconds(shapes.target)


def _token_seconds(target: Shape) -> float:
    return target.num_bytes / READ_BYTES_PER_SECOND + target.num_layers * LAYER_SECONDS


def _report(recipe: Recipe, shapes: Shapes) -> _Costs:
    bench, target = recipe.bench, shapes.target
    tokens = 6 * bench.num_prompts_per_task * bench.max_new_tokens
    token_seconds = _token_seconds(target)
    memory = target.num_bytes + _packed_bytes(recipe, shapes)
    seconds = 20 + tokens * token_seconds * len(bench.systems) * bench.repeats
    return 0, memory * 1.5, 1e6, seconds


def _packed_bytes(recipe: Recipe, shapes: Shapes) -> int:
    """Of all members but the target."""
    total = shapes.target.num_int4_bytes + shapes.target.num_draft_bytes
    if recipe.small is not None and shapes.small is not None:
        is_int4, has_head = recipe.small.quantize, recipe.small.has_head
        total += shapes.small.num_int4_bytes if is_int4 else shapes.small.num_bytes
        total += shapes.small.num_draft_bytes if has_head else 0
    return total


def _row_tokens(recipe: Recipe) -> float:
    return min(recipe.data.max_tokens, _CONVERSATION_TOKENS)
