"""Loads Medusa's and Hydra's heads."""

from torch import Tensor

from polybasic.chain.formats.checkpoints.config import ConfigFile
from polybasic.chain.formats.checkpoints.decoder_config import HeadConfig
from polybasic.chain.formats.head_kinds.medusa import HYDRA
from polybasic.chain.kernels.backend import Backend
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.rotary import RotaryTable
from polybasic.chain.kernels.selection import backend_for
from polybasic.chain.kernels.torch.medusa import (
    HydraExecutor,
    MedusaExecutor,
    MedusaWeights,
    TokenHead,
)
from polybasic.chain.kernels.weights import Embedding
from polybasic.chain.model.loading import check_target, stored_draft_token_ids
from polybasic.chain.model.stored import StoredTensors


def load_medusa(file: ConfigFile, target: Executor, num_positions: int) -> MedusaExecutor:
    """As `polybasic.chain.model.loading.load_head`.

    Raises:
        UserError: shapes that differ from the target's, a missing weight, or a malformed draft
            vocabulary.
    """
    config, verifier = file.head, target.weights
    check_target(config, verifier, f"{file.path}")
    backend = backend_for(verifier.device, verifier.dtype, verifier.config)
    backend.rounds_float32 = verifier.in_few_bits
    tensors = StoredTensors(file.folder, verifier.dtype, verifier.device)
    return medusa_executor(
        config, tensors, backend, verifier.embedding, stored_draft_token_ids(tensors)
    )


def medusa_executor(
    config: HeadConfig,
    tensors: StoredTensors,
    backend: Backend,
    embedding: Embedding,
    token_ids: Tensor | None,
) -> MedusaExecutor:
    """What runs heads with these weights.

    Args:
        tensors: named as in checkpoints of their kind.
        embedding: the verifier's.
        token_ids: int64 [V'], those that they draft; None for all.

    Raises:
        UserError: a missing weight.
    """
    assert config.num_positions is not None, "a kind with heads by place"
    is_hydra = config.kind == HYDRA.name
    heads = []
    for place in range(config.num_positions):
        names, joined = [f"blocks.{place}.layers.{n}" for n in range(config.num_blocks)], None
        if is_hydra:
            given = names.pop(0), f"blocks.{place}.residual"
            joined = tensors.linear(backend, *given, lay_out=backend.draft)
        blocks = tuple(tensors.linear(backend, name, lay_out=backend.draft) for name in names)
        lm_head = tensors.linear(backend, f"lm_heads.{place}", lay_out=backend.draft)
        heads.append(TokenHead(blocks, lm_head, joined))
    weights = MedusaWeights(
        config,
        embedding,
        (),
        RotaryTable(config, 0, tensors.dtype, tensors.device),
        heads[0].lm_head,
        draft_token_ids=token_ids,
        heads=tuple(heads),
    )
    return (HydraExecutor if is_hydra else MedusaExecutor)(weights)
