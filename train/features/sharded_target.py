"""A target that no single GPU holds: its layers partitioned over the processes by ZeRO-3."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.integrations import HfDeepSpeedConfig

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.tokenizer import load_tokenizer
from polybasic.chain.model.reference import load_reference_model
from polybasic.train.engine import quiet_deepspeed
from polybasic.train.features.target import Target, checked_target

_WHOLE_BELOW = 10_000
"""Parameters of fewer elements (norms, biases) stay whole in each process."""

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ShardedTarget(Target):
    """A target each of whose passes is run by all processes together.

    Features and `generate` must be asked for by all processes equally often, of whatever rows.
    lm_head lies whole in each process, the embedding whole on its CPU.

    Attributes:
        engine: DeepSpeed's; it gathers a layer's weights before its pass and drops them after.
        zero3: while this lives, transformers loads partitioned and generates in step.
    """

    engine: Any
    zero3: HfDeepSpeedConfig


def load_sharded_target(
    folder: Path, tokenizer: Path | None = None, dtype: torch.dtype | None = None
) -> Target:
    """Load a target so that each process holds its part; call inside `process_group`.

    Args:
        folder: of a transformers checkpoint; the first process maps its files and hands out
            the parts.
        tokenizer: folder of the tokenizer; default: `folder`.
        dtype: of its passes; default: as it is stored.

    Raises:
        UserError: as `load_target`, or a checkpoint that does not say its dtype.
    """
    deepspeed = quiet_deepspeed()
    dtype = dtype or _stored_dtype(folder)
    config = {
        "train_micro_batch_size_per_gpu": 1,  # required, without effect: nothing is trained
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": _WHOLE_BELOW},
        "steps_per_print": None,
    }
    halves = {name: {"enabled": True} for name, half in _HALVES.items() if dtype == half}
    zero3 = HfDeepSpeedConfig({**config, **halves})
    model = load_reference_model(folder, dtype)
    model.requires_grad_(False)
    embedding = _gathered(model.get_input_embeddings())
    lm_head = _gathered(model.get_output_embeddings())
    model.get_output_embeddings().weight = nn.Parameter(lm_head, requires_grad=False)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(lm_head.device)
    # the decoder is what both features and generate run, so its passes are what hooks count;
    # weights keep the dtype that they have, which on a CPU may be one that no engine trains in
    engine, *_ = deepspeed.initialize(model=model.model, config=config, dist_init_required=False)
    model.model.eval()
    target = checked_target(
        model, load_tokenizer(tokenizer or folder, "target's tokenizer"), folder
    )
    return ShardedTarget(
        model=model,
        tokenizer=target.tokenizer,
        lm_head=target.lm_head,
        embedding=embedding.cpu(),
        engine=engine,
        zero3=zero3,
    )


def _stored_dtype(folder: Path) -> torch.dtype:
    dtype = AutoConfig.from_pretrained(folder, trust_remote_code=False).dtype
    if not isinstance(dtype, torch.dtype):
        raise UserError(
            "checkpoint without a dtype",
            f"{folder / 'config.json'} torch_dtype = {dtype}",
            "add the dtype of its weights, bfloat16 for example",
        )
    return dtype


def _gathered(module: nn.Module) -> Tensor:
    """A copy of a module's whole weight in each process."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    with quiet_deepspeed().zero.GatheredParameters([weight]):
        return weight.detach().clone()
