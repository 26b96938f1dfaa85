"""Loads early exits: the first layers of a loaded model, and what was trained to leave them."""

from dataclasses import replace

from torch import Tensor

from polybasic.chain.formats.checkpoints.config import ConfigFile
from polybasic.chain.formats.checkpoints.decoder_config import HeadConfig
from polybasic.chain.formats.head_kinds.early_exit import (
    ADAPTER_DOWN,
    ADAPTER_UP,
    NORM,
    check_exit_layer,
)
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.selection import backend_for
from polybasic.chain.model.loading import check_target, stored_draft_token_ids
from polybasic.chain.model.stored import StoredTensors


def load_early_exit(file: ConfigFile, target: Executor, num_positions: int) -> Executor:
    """Load an early exit of `target`, whose layers, embedding and rotary tables it runs.

    Args:
        file: of the exit.
        target: its model, whole.
        num_positions: as `polybasic.chain.model.loading.load_decoder`; those of the target hold.

    Raises:
        UserError: shapes or an exit layer that the target does not have, a missing weight, or a
            malformed draft vocabulary.
    """
    check_target(file.head, target.weights, f"{file.path}")
    tensors = StoredTensors(file.folder, target.dtype, target.device)
    check_exit_layer(file.head, target.config.num_layers, f"{file.path}")
    return early_exit(file.head, tensors, target, stored_draft_token_ids(tensors))


def early_exit(
    config: HeadConfig, tensors: StoredTensors, target: Executor, token_ids: Tensor | None
) -> Executor:
    """An early exit as a decoder of fewer layers; nothing of the target is copied but lm_head,
    where kernels round what drafts.

    Args:
        config: of the exit.
        tensors: what its checkpoint holds.
        target: its model, or at least the layers that it runs.
        token_ids: int64 [V'], those that it drafts; None for all.

    Raises:
        UserError: a missing weight.
    """
    whole = target.weights
    assert whole.draft_lm_head is not None, "a verifier"
    adapter = None
    if config.adapter_rank:
        backend = backend_for(target.device, target.dtype, whole.config)
        down, up = (tensors.linear(backend, name) for name in (ADAPTER_DOWN, ADAPTER_UP))
        adapter = down, up
    weights = replace(
        whole,
        config=whole.config.of_first_layers(config.exit_layer),
        layers=whole.layers[: config.exit_layer],
        lm_head=whole.draft_lm_head(token_ids),
        final_norm=tensors.dense(f"{NORM}.weight"),
        adapter=adapter,
        draft_token_ids=token_ids,
        draft_lm_head=None,
    )
    return target.over(weights)
