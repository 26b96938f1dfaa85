"""Early exits: the first layers of a model draft for it, with a norm of their own behind them.

As in LayerSkip (Elhoushi et al., arXiv 2404.16710). The adapter corrects the last layer's output as
a tuned lens does (Belrose et al., arXiv 2303.08112), with a matrix of low rank.
"""

from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.decoder_config import HeadConfig, ModelSizes, Shape
from polybasic.chain.formats.head_kinds.kind import Content, HeadKind, is_whole, model_config

EXIT_LAYER, ADAPTER_RANK = "exit_layer", "adapter_rank"
"""In config.json: how many layers are run, and the width of the adapter behind them."""
NORM, ADAPTER_DOWN, ADAPTER_UP = "norm", "adapter.down", "adapter.up"
"""Names of what is stored, without `.weight`."""
RANK_UNIT = 16
"""Ranks are multiples of it, as kernels' sizes are."""
_MAX = 1 << 16


def _fields(content: Content, where: str) -> dict[str, Any]:
    found = {EXIT_LAYER: content.get(EXIT_LAYER), ADAPTER_RANK: content.get(ADAPTER_RANK, 0)}
    layers, ranks = range(1, _MAX + 1), range(0, _MAX + 1, RANK_UNIT)
    for (key, value), allowed in zip(found.items(), (layers, ranks), strict=True):
        if not is_whole(value, allowed):
            raise UserError(
                "malformed early exit",
                f"{where} {key} {value!r}",
                f"it is a multiple of {allowed.step} from {allowed.start} on: train the exit again",
            )
    return found


def _tensors(config: HeadConfig) -> dict[str, Shape]:
    H, rank = config.hidden_size, config.adapter_rank
    shapes: dict[str, Shape] = {f"{NORM}.weight": (H,)}
    if rank:
        shapes |= {f"{ADAPTER_DOWN}.weight": (rank, H), f"{ADAPTER_UP}.weight": (H, rank)}
    return shapes


def early_exit_config(
    sizes: ModelSizes,
    exit_layer: int,
    adapter_rank: int,
    dtype: str,
    draft_vocab_size: int | None = None,
) -> dict[str, Any]:
    """The content of config.json for an early exit, but for what it was trained for.

    Args:
        sizes, dtype, draft_vocab_size: as `model_config`.
        exit_layer: how many layers it runs.
        adapter_rank: 0 for no adapter.
    """
    return {
        EXIT_LAYER: exit_layer,
        ADAPTER_RANK: adapter_rank,
        **model_config(sizes, dtype, draft_vocab_size),
    }


def check_exit_layer(config: HeadConfig, num_layers: int, where: str) -> None:
    """Check that a model of so many layers has those that an early exit runs, and more.

    Args:
        where: the exit's config, for errors.

    Raises:
        UserError: it has not.
    """
    if config.exit_layer >= num_layers:
        raise UserError(
            "early exit behind the last layer",
            f"{where} {EXIT_LAYER} {config.exit_layer} of {num_layers} layers",
            f"train an exit behind layer 1 to {num_layers - 1}",
        )


EARLY_EXIT = HeadKind(
    name="early_exit",
    title="Early exit",
    tensors=_tensors,
    load="polybasic.chain.model.early_exit:load_early_exit",
    drafter="polybasic.deploy.runtime.drafters.early_exit:EarlyExitDrafter",
    shares_cache=True,
    fields=_fields,
)
