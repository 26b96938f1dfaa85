"""Where bytes lie: memory of every process that trains a head or runs a chain, from counts."""

from dataclasses import dataclass, replace

from polybasic.chain.base.errors import UserError
from polybasic.recipes.estimates.hardware_profiles import Hardware
from polybasic.recipes.estimates.sizes import DecoderSizes, count_of_head
from polybasic.recipes.schema.recipe import Recipe

ADAM_BYTES = 16
"""Of one trained parameter: float32 weight, gradient and two moments."""
_SHARED_ADAM_BYTES = 12
"""Of those, what ZeRO divides over the processes."""
SERVING = 1.15
"""Of the members' bytes: caches, logits and what else a running chain holds."""


@dataclass(frozen=True)
class Shapes:
    """Of the models that a recipe starts from; it may have no smaller one.

    Attributes:
        intermediates: further ones below these, which run as they are.
    """

    target: DecoderSizes
    small: DecoderSizes | None
    intermediates: tuple[DecoderSizes, ...] = ()


@dataclass(frozen=True)
class Case:
    """What the costs of a stage are counted from.

    Attributes:
        copies_target: whether the chain gets one that takes room on the disk.
    """

    recipe: Recipe
    shapes: Shapes
    hardware: Hardware
    copies_target: bool = False


def check_divides(case: Case) -> None:
    """Refuse tensor parallelism that a model's key/value heads cannot be divided for.

    Raises:
        UserError: the number of devices does not divide them.
    """
    for section in ("plan", "bench"):
        num_ranks = getattr(case.recipe, section).tensor_parallel
        for shape, _ in _divided(case):
            heads = shape.num_kv_heads
            if heads % num_ranks:
                raise UserError(
                    "devices do not divide the key/value heads",
                    f"{section}.tensor_parallel = {num_ranks}, heads {heads}",
                    f"use {' or '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)}",
                )


def ranks_of(name: str, case: Case, memory_bytes: float) -> tuple[int, float]:
    """How many processes do a stage together, and the memory of each but the first."""
    recipe = case.recipe
    match name:
        case "draft" | "small_draft" if not is_on_host(name, recipe):
            return recipe.train.num_processes, memory_bytes
        case "regenerated" if memory_bytes:
            return recipe.train.num_processes, memory_bytes
        case "plan":
            num_ranks = recipe.plan.tensor_parallel
        case "report":
            num_ranks = recipe.bench.tensor_parallel
        case _:
            return 1, 0
    embeddings = sum(2 * shape.num_embedding_parameters for shape, _ in _divided(case))
    return num_ranks, (embeddings + _divided_bytes(case) / num_ranks) * SERVING


def is_on_host(name: str, recipe: Recipe) -> bool:
    """Whether a stage's peak of memory is the host's, on a machine with a GPU."""
    match name:
        case "intermediate" | "small":
            return not recipe.distills
        case "draft":
            return recipe.draft.model != "train" and recipe.draft.adapt == "none"
    return name in ("data", "target", "chain")


def as_trained(case: Case, shape: DecoderSizes) -> DecoderSizes:
    """A stored model as passes of PyTorch over it have its weights."""
    # a dtype that is named is that of these passes, too, if the model is stored in it
    is_wide = case.hardware.trains_in_float32 and case.recipe.train.dtype in ("auto", "float32")
    return replace(shape, weight_bytes=4) if is_wide else shape


def training_bytes(recipe: Recipe, shape: DecoderSizes) -> float:
    """Of one process: the target (a share of it in ZeRO-3), the head's states, activations."""
    train, head = recipe.train, count_of_head(shape, recipe.train)
    tokens = train.batch_size * recipe.data.max_tokens / train.num_processes
    # by the usual count of a layer's bfloat16 activations, once a step
    layer = 2 * (34 * shape.hidden_size + 6 * shape.intermediate_size)
    target, adam = float(shape.num_bytes), float(ADAM_BYTES)
    if train.zero_stage == 3:
        # lm_head stays whole, the embedding goes to the host, a layer's weights are gathered
        whole = shape.num_embedding_parameters + shape.num_layer_parameters
        divided = shape.num_layers * shape.num_layer_parameters / train.num_processes
        target = shape.weight_bytes * (whole + divided)
    if train.zero_stage and train.optimizer == "adamw":
        adam -= _SHARED_ADAM_BYTES * (1 - 1 / train.num_processes)
    return target + head.num_parameters * adam + tokens * head.num_steps * layer


def running_bytes(case: Case, num_ranks: int) -> float:
    """Of the first rank, which holds all heads and drafters, and its part of what is divided."""
    members = case.shapes.target.num_bytes + packed_bytes(case)
    return members - _divided_bytes(case) * (1 - 1 / num_ranks)


def _divided(case: Case) -> list[tuple[DecoderSizes, bool]]:
    """The verifying models, which tensor parallelism divides, and whether each is in 4 bits."""
    small, shape = case.recipe.small, case.shapes.small
    models = [(case.shapes.target, False)]
    models += [(case.shapes.target, True)] if case.recipe.quantize else []
    if small is not None and shape is not None and small.role == "intermediate":
        models.append((shape, small.quantize))
    return models


def _divided_bytes(case: Case) -> float:
    return sum(shape.divided_bytes(is_int4) for shape, is_int4 in _divided(case))


def packed_bytes(case: Case) -> int:
    """Of all members but the target, whose shape decides on those that are made of it."""
    recipe, shapes = case.recipe, case.shapes
    train = recipe.train
    total = shapes.target.num_int4_bytes if recipe.quantize else 0
    total += count_of_head(shapes.target, train).num_bytes
    total += sum(shape.num_bytes for shape in shapes.intermediates)
    if recipe.small is not None and shapes.small is not None:
        is_int4, has_head = recipe.small.quantize, recipe.small_has_head
        total += shapes.small.num_int4_bytes if is_int4 else shapes.small.num_bytes
        total += count_of_head(shapes.small, train).num_bytes if has_head else 0
    return total
