"""A head in training as the runtime runs it."""

from torch import Tensor

from polybasic.chain.formats.checkpoints.config import head_config as read_head_config
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.product_times import name_of
from polybasic.chain.kernels.selection import backend_for
from polybasic.chain.kernels.weights import Linear
from polybasic.chain.model.loading import head_weights
from polybasic.chain.model.medusa import medusa_executor
from polybasic.chain.model.stored import GivenTensors
from polybasic.train.features.lm_head import LmHead
from polybasic.train.head.eagle2 import DraftHead
from polybasic.train.head.early_exit import EarlyExit
from polybasic.train.head.files import head_config
from polybasic.train.head.medusa import MedusaHead
from polybasic.train.head.start import trained_weights
from polybasic.train.head.steering import Steering


def served_head(
    head: DraftHead, lm_head: LmHead, num_positions: int, trimmed: bool = True
) -> Executor:
    """What serving would load, made of the weights that the head has now.

    Matrices are not rounded to 4 bits, as kernels do when they serve a head in a half precision.

    Args:
        head: in a dtype that models are served in.
        lm_head: the verifier's.
        num_positions: of the rotary table.
        trimmed: whether a head with a draft vocabulary drafts among it.
    """
    weight, dtype = head.embed_tokens.weight.detach(), head.dtype
    config = read_head_config(head_config(head.shape, "", name_of(dtype)), "the head")
    backend = backend_for(weight.device, dtype, config)
    tensors = GivenTensors(trained_weights(head), dtype, weight.device)
    token_ids = head.draft_token_ids if trimmed else None
    if isinstance(head, Steering):
        return head.served(tensors, num_positions)
    if isinstance(head, EarlyExit):
        return head.served(config, tensors, num_positions, token_ids)
    if isinstance(head, MedusaHead):
        return medusa_executor(config, tensors, backend, weight.to(dtype), token_ids)

    def draft_lm_head(token_ids: Tensor | None) -> Linear:
        rows = slice(None) if token_ids is None else token_ids
        return backend.dense(lm_head.weight[rows].to(dtype))

    return backend.executor(
        head_weights(
            config,
            tensors,
            backend,
            num_positions,
            weight.to(dtype),
            draft_lm_head,
            lm_head.softcap,
            token_ids,
        )
    )
