"""What each stage costs: parameters, peak memory, bytes written and seconds, from counts."""

from dataclasses import dataclass

from polybasic.quantize.settings import QuantizeSettings
from polybasic.recipes.estimates.hardware_profiles import Hardware
from polybasic.recipes.estimates.memory import (
    ADAM_BYTES,
    SERVING,
    Case,
    as_trained,
    is_on_host,
    packed_bytes,
    ranks_of,
    running_bytes,
    training_bytes,
)
from polybasic.recipes.estimates.sizes import DecoderSizes, count_of_head
from polybasic.recipes.pipeline.running import StageState
from polybasic.recipes.schema.recipe import NUM_TASKS, Recipe
from polybasic.train.settings import SHIPPED

_SHAREGPT_TOKENS = 1500
"""Of a conversation cut at 2048: EAGLE's hidden states of 68,000 of them, 8 KiB a token, take 0.6
to 1.1 TB (its README), which is 1,080 to 1,980 tokens each."""
_SHAREGPT_CONVERSATIONS = 68_000
"""That EAGLE trains on, of ShareGPT's V4.3; a file is not counted before a run."""
_SHIPPED_TOKENS = 280
_QUESTION_TOKENS = 40
_SHIPPED_CONVERSATIONS = 955
_TOKEN_BYTES = 5
_ANSWERED = 0.6
"""Share of a conversation's tokens that the assistant wrote."""
_PROCESS_BYTES = 700e6
_SEARCH_PASSES = 8
"""AWQ's grid of scales and clips, in forward passes over the calibration tokens."""
_DISK_BYTES_PER_SECOND = 1e9


@dataclass(frozen=True)
class StageEstimate:
    """What a stage needs if it runs.

    Attributes:
        memory_bytes: of the first rank, which needs most.
        is_on_host: on a machine with a GPU, the peak of memory is the host's.
        num_ranks: processes that do it together, each with a device of its own.
        other_rank_bytes: memory of each rank but the first.
    """

    name: str
    state: StageState
    num_parameters: int
    memory_bytes: float
    is_on_host: bool
    disk_bytes: float
    seconds: float
    num_ranks: int = 1
    other_rank_bytes: float = 0


_Costs = tuple[int, float, float, float]


def estimate_stage(name: str, state: StageState, case: Case) -> StageEstimate:
    """The estimate of one stage of the pipeline."""
    num_parameters, memory_bytes, disk_bytes, seconds = _costs(name, case)
    num_ranks, other_bytes = ranks_of(name, case, memory_bytes)
    return StageEstimate(
        name,
        state,
        num_parameters,
        _PROCESS_BYTES + memory_bytes,
        is_on_host(name, case.recipe),
        disk_bytes,
        seconds,
        num_ranks,
        _PROCESS_BYTES + other_bytes,
    )


def _costs(name: str, case: Case) -> _Costs:
    recipe, target, small = case.recipe, case.shapes.target, case.shapes.small
    match name:
        case "data":
            return 0, 0, 0, 1
        case "target":
            return _ready(target, is_merged=recipe.target.adapter is not None)
        case "draft" if recipe.draft.model != "train" and recipe.draft.adapt == "none":
            return _imported(target)
        case "draft":
            return _draft(case, target)
        case "self_prompted":
            num_tokens = (recipe.data.self_prompted or 0) * _QUESTION_TOKENS
            return _written(case, num_tokens, 2 * num_tokens * _TOKEN_BYTES, num_processes=1)
        case "regenerated":
            return _regenerated(case)
        case "intermediate":
            return _quantized(case, target)
        case "chain":
            return _chain(case)
        case "plan":
            return _plan(case)
        case "report":
            return _report(case)
    assert small is not None, f"stage {name} without section small"
    match name:
        case "small_target":
            return _ready(small, is_merged=False)
        case "small":
            return _quantized(case, small)
        case "small_draft":
            return _draft(case, small)
    raise AssertionError(f"no estimate for stage {name}")


def _ready(shape: DecoderSizes, is_merged: bool) -> _Costs:
    """A model that is taken as it is, or with an adapter merged into it."""
    num_bytes = shape.num_bytes if is_merged else 0
    return shape.num_parameters, num_bytes, num_bytes, _reading_seconds(2 * num_bytes)


def _imported(shape: DecoderSizes) -> _Costs:
    num_bytes = shape.num_draft_bytes
    return shape.num_draft_parameters, 2 * num_bytes, num_bytes, 5 + _reading_seconds(num_bytes)


def _draft(case: Case, shape: DecoderSizes) -> _Costs:
    recipe, train, shape = case.recipe, case.recipe.train, as_trained(case, shape)
    head = count_of_head(shape, train)
    step_tokens = train.batch_size * _row_tokens(recipe)
    # projections of a head's own are among its parameters; through a frozen one go states
    has_own = train.kind not in ("eagle2", "early_exit", "steering")
    projection = 0 if has_own else 4 * head.num_projected
    step_operations = step_tokens * head.num_steps * (6 * head.num_parameters + projection)
    num_answered = train.num_steps * train.batch_size  # rows that the target passes over
    if train.features == "offline":
        num_answered = min(num_answered, train.num_conversations or _num_conversations(recipe))
    target_operations = num_answered * _row_tokens(recipe) * 2 * shape.num_parameters
    evaluation_operations = (
        (train.eval_conversations or recipe.data.num_heldout)
        * train.eval_answer_tokens
        * train.eval_tree_depth
        * train.eval_tree_top_k
        * 2
        * (shape.num_draft_parameters + head.num_projected)
    )
    num_evaluations = 1 + train.num_steps // train.eval_every_steps
    operations = (
        train.num_steps * step_operations
        + target_operations
        + num_evaluations * evaluation_operations
    )
    seconds = operations / case.hardware.training_flops / train.num_processes
    disk = head.num_bytes + 2.0 * ADAM_BYTES * head.num_parameters
    if train.features == "offline":
        features = num_answered * _row_tokens(recipe) * head.feature_bytes
        disk += features
        seconds += _reading_seconds(2 * features)
    return (
        head.num_parameters,
        training_bytes(recipe, shape),
        disk,
        15 + _reading_seconds(shape.num_bytes) + seconds,
    )


def _regenerated(case: Case) -> _Costs:
    """Answers of the target; what a server takes for them is its own affair."""
    recipe = case.recipe
    settings = recipe.data.regenerate
    assert settings is not None, "the stage is there for the section"
    num_tokens = _num_conversations(recipe) * _row_tokens(recipe)
    disk = 2 * num_tokens * _TOKEN_BYTES
    if settings.endpoint is not None:
        return 0, 0, disk, 1
    return _written(case, num_tokens * _ANSWERED, disk, recipe.train.num_processes)


def _written(case: Case, num_tokens: float, disk: float, num_processes: int) -> _Costs:
    """So many tokens that the target writes through this runtime."""
    recipe, target = case.recipe, case.shapes.target
    settings = recipe.data.regenerate
    assert settings is not None, "the target writes nothing without it"
    # a pass reads the weights once for all answers, and multiplies for each
    alone, products = _token_seconds(target, case.hardware), 2.0 * target.num_parameters
    together = max(alone / settings.num_parallel, products / case.hardware.training_flops)
    seconds = 20 + num_tokens / num_processes * together
    return target.num_parameters, target.num_bytes * SERVING, disk, seconds


def _quantized(case: Case, shape: DecoderSizes) -> _Costs:
    quantize, hardware = case.recipe.quantize, case.hardware
    if quantize is None:
        # rounded in seconds, and compared with the model in float32, side by side
        compared = 4 * shape.num_parameters * QuantizeSettings().num_quality_tokens
        seconds = _reading_seconds(4 * shape.num_bytes) + compared / hardware.float32_flops
        memory = 2 * 4.0 * shape.num_parameters
        return shape.num_parameters, memory, float(shape.num_int4_bytes), 5 + seconds
    tokens = quantize.num_calibration_samples * quantize.calibration_tokens
    passes = 2 * shape.num_parameters
    search = passes * (tokens * _SEARCH_PASSES + 2 * quantize.num_quality_tokens)
    # target and copy in float32, side by side
    memory = 2 * 4 * shape.num_parameters + 40.0 * tokens * shape.hidden_size
    disk, seconds = float(shape.num_int4_bytes), search / hardware.float32_flops
    if quantize.distill is not None:
        distill = quantize.distill
        # target forward; copy forward and backward to activations, through weights made anew
        distilled = 4 * passes * distill.num_steps * distill.batch_tokens
        compared = 4 * passes * quantize.num_quality_tokens
        seconds += (distilled + compared) / hardware.float32_flops
        memory, disk = 2 * memory, 2 * disk
    loading = _reading_seconds(4 * shape.num_bytes)
    return shape.num_parameters, memory, disk, 5 + loading + seconds


def _chain(case: Case) -> _Costs:
    disk = float(packed_bytes(case))
    if case.copies_target:
        disk += case.shapes.target.num_bytes
    hashed = case.shapes.target.num_bytes + disk
    return 0, 0, disk, 1 + _reading_seconds(hashed + disk)


def _plan(case: Case) -> _Costs:
    plan, target = case.recipe.plan, case.shapes.target
    answers = NUM_TASKS * plan.num_prompts_per_task
    # Each position is drafted for once a top_k; each shape is timed on an answer, twice.
    drafts = answers * plan.max_new_tokens * len(plan.grid.top_ks)
    timed = 2 * (3 * len(plan.grid.top_ks) + len(plan.grid.rows)) * plan.max_new_tokens
    tokens = answers * plan.max_new_tokens + drafts + timed
    memory = running_bytes(case, plan.tensor_parallel)
    token_seconds = _token_seconds(target, case.hardware, plan.tensor_parallel)
    measuring = min(tokens * token_seconds, plan.max_seconds)
    return 0, memory * SERVING, 1e7, 20 + _loading_seconds(case) + measuring


def _report(case: Case) -> _Costs:
    bench, target = case.recipe.bench, case.shapes.target
    tokens = NUM_TASKS * bench.num_prompts_per_task * bench.max_new_tokens
    memory = running_bytes(case, bench.tensor_parallel)
    if "hf_generate" in bench.expected_systems:
        memory += as_trained(case, target).num_bytes  # a target of its own
    turns = tokens * len(bench.expected_systems) * bench.repeats
    token_seconds = _token_seconds(target, case.hardware, bench.tensor_parallel)
    return 0, memory * SERVING, 1e6, 20 + _loading_seconds(case) + turns * token_seconds


def _token_seconds(target: DecoderSizes, hardware: Hardware, num_ranks: int = 1) -> float:
    read = target.num_bytes - target.divided_bytes() * (1 - 1 / num_ranks)
    # a sum over the ranks after attention, and one after the MLP
    summing = 2 * hardware.all_reduce_seconds if num_ranks > 1 else 0
    layers = target.num_layers * (hardware.layer_seconds + summing)
    return read / hardware.read_bytes_per_second + layers


def _loading_seconds(case: Case) -> float:
    return _reading_seconds(case.shapes.target.num_bytes + packed_bytes(case))


def _row_tokens(recipe: Recipe) -> float:
    is_shipped = recipe.data.conversations == SHIPPED
    return min(recipe.data.max_tokens, _SHIPPED_TOKENS if is_shipped else _SHAREGPT_TOKENS)


def _num_conversations(recipe: Recipe) -> int:
    is_shipped = recipe.data.conversations == SHIPPED
    num = _SHIPPED_CONVERSATIONS if is_shipped else _SHAREGPT_CONVERSATIONS
    return min(num, recipe.data.limit or num) + (recipe.data.self_prompted or 0)


def _reading_seconds(num_bytes: float) -> float:
    return num_bytes / _DISK_BYTES_PER_SECOND
