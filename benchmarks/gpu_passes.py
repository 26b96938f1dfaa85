"""What passes and drafts cost on the device, by rows, each captured as a graph.

The passes are those of the runtime's device path. The target's are measured a second time with
cuBLAS's products in the place of the kernels that the runtime chose.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from gpu_budget import Allowance
from gpu_clock import captured, device_seconds
from gpu_names import CUBLAS, RUNTIME
from timing import Spread
from torch import Tensor
from traffic import Moved, member_draft, member_pass

from polybasic.chain.errors import UserError
from polybasic.chain.formats.plan import Tree
from polybasic.chain.kernels.torch.operations import Operations
from polybasic.chain.kernels.torch.rows import causal_rows
from polybasic.chain.model.device_model import DeviceModel
from polybasic.chain.model.head import EagleHead
from polybasic.deploy import Chain
from polybasic.deploy.graphs.capture import Graphs
from polybasic.deploy.graphs.device_tree import expand
from polybasic.deploy.rounds.cache import KeyValueCache
from polybasic.deploy.rounds.verifier import SPARE_ROWS

SECONDS = 2.0
"""That capturing and timing one pass takes, once its kernels are there."""


@dataclass(frozen=True)
class PassSettings:
    """What is measured.

    Attributes:
        contexts: tokens before a pass; drafts stand behind the first of them.
        rows: of passes.
        repeats: calls of each in a turn.
    """

    contexts: tuple[int, ...]
    rows: tuple[int, ...]
    repeats: int
    turns: int


@torch.inference_mode()
def measure_passes(
    chain: Chain,
    settings: PassSettings,
    bandwidth: float,
    found: dict[str, Any],
    allowance: Allowance,
) -> None:
    """Time passes of verifying members, and of the target with cuBLAS.

    Args:
        bandwidth: bytes a second, by which bounds are computed.
        found: member -> kernels -> context -> rows -> cost; filled on the way.

    Raises:
        UserError: the chain does not run on the device path.
    """
    verifiers = chain.engine.verifiers
    models = {name: device_model_of(one.decoder, name) for name, one in verifiers.items()}
    target = next(iter(models))
    kinds = {(name, RUNTIME): model for name, model in models.items()}
    kinds[target, CUBLAS] = with_cublas(models[target])
    graphs = Graphs(chain.engine.models.target.device, chain.engine.graphs.enabled, most=4)
    for context in settings.contexts:
        for rows in settings.rows:
            runs: dict[tuple[str, str], Callable[[], None]] = {}
            for (name, kernels), model in kinds.items():
                what = f"{name} by {kernels}, {rows} rows behind {context}"
                if allowance.allows(what, SECONDS):
                    with allowance.trying(what):
                        run = pass_over(model, verifiers[name].cache, context, rows)
                        key = name, kernels, context, rows
                        runs[name, kernels] = captured(graphs, key, run)
            taken = device_seconds(runs, settings.turns, settings.repeats, graphs.device)
            for (name, kernels), seconds in taken.items():
                moved = member_pass(chain, name, context, rows)
                by_context = found.setdefault(name, {}).setdefault(kernels, {})
                by_rows = by_context.setdefault(str(context), {})
                by_rows[str(rows)] = cost_json(seconds, moved, bandwidth)
            allowance.save()


@torch.inference_mode()
def measure_drafts(
    chain: Chain,
    trees: Sequence[Tree],
    settings: PassSettings,
    bandwidth: float,
    found: dict[str, Any],
    allowance: Allowance,
) -> None:
    """Time whole drafts of the chain's heads: all levels, the choice of each among them.

    Args:
        bandwidth: bytes a second, by which bounds are computed.
        found: head -> shape -> cost of a draft and of one level of it; filled on the way.
    """
    context = settings.contexts[0]
    heads = {
        name: model
        for name, model in chain.engine.models.drafters.items()
        if isinstance(model, EagleHead)
    }
    graphs = Graphs(chain.engine.models.target.device, chain.engine.graphs.enabled, most=4)
    for name, head in heads.items():
        cache = KeyValueCache(head.config, 1, context + SPARE_ROWS, head.dtype, head.device)
        for tree in trees:
            shape = f"{tree.depth}x{tree.top_k}"
            if not allowance.allows(f"draft {shape}", SECONDS):
                continue
            with allowance.trying(f"draft {shape}"):
                run = captured(graphs, (name, shape), draft_of(head, cache, context, tree))
                seconds = device_seconds(
                    {shape: run}, settings.turns, settings.repeats, graphs.device
                )[shape]
                moved = member_draft(chain, name, context, tree.depth, tree.top_k)
                level = seconds.times(1e3 / tree.depth).to_json()
                cost = {**cost_json(seconds, moved, bandwidth), "milliseconds_a_level": level}
                found.setdefault(name, {})[shape] = cost


def with_cublas(model: DeviceModel) -> DeviceModel:
    """The same model, whose norms and products are PyTorch's; all else stays the runtime's."""
    other, reference = DeviceModel(model.parts), Operations()
    operations: Any = copy(model.operations)
    operations.norm, operations.product = reference.norm, reference.product
    operations.gated_product = reference.gated_product
    other.operations = operations
    return other


def pass_over(
    model: DeviceModel, cache: KeyValueCache, context: int, rows: int
) -> Callable[[], None]:
    """A pass over consecutive tokens behind `context` ones, up to the choice of tokens."""
    device = cache.block.device
    prefix = torch.tensor(context, device=device)
    tokens = torch.randint(0, model.parts.config.vocab_size, (rows,)).to(device)
    chosen = torch.zeros(rows, dtype=torch.int64, device=device)

    def run() -> None:
        states = model.forward(tokens, cache.layers, causal_rows(prefix, rows))
        chosen.copy_(model.operations.most_probable(model.logits(states)))

    return run


def draft_of(head: EagleHead, cache: KeyValueCache, context: int, tree: Tree) -> Callable[[], None]:
    """All levels of a draft behind `context` tokens."""
    model = device_model_of(head, "the draft head")
    state = torch.randn(1, head.config.hidden_size).to(head.device, head.dtype)
    prefix = torch.tensor(context, device=head.device)

    def forward(tokens: Tensor, states: Tensor, rows: Any) -> Tensor:
        return model.forward(tokens, cache.layers, rows, states)

    def run() -> None:
        expand(
            forward,
            model.logits,
            model.operations,
            state,
            prefix,
            tree.depth,
            tree.top_k,
            head.draft_token_ids,
        )

    return run


def cost_json(seconds: Spread, moved: Moved, bandwidth: float) -> dict[str, Any]:
    """As a record holds it."""
    bound = moved.total / bandwidth
    return {
        "milliseconds": seconds.times(1e3).to_json(),
        "bytes": {**vars(moved), "total": moved.total},
        "bound_milliseconds": 1e3 * bound,
        "times_bound": seconds.median / bound,
    }


def median_of(cost: Mapping[str, Any], key: str = "milliseconds") -> float:
    """A cost's median in milliseconds."""
    return float(cost[key]["median"])


def device_model_of(model: Any, name: str) -> DeviceModel:
    """The passes of a decoder or a draft head on the device.

    Raises:
        UserError: it has none.
    """
    found: DeviceModel | None = model.device_model
    if found is None:
        raise UserError(
            "no passes on the device",
            f"{name} on {model.device}",
            "set POLYBASIC_KERNELS=device on a CPU, and unset it on a GPU",
        )
    return found
