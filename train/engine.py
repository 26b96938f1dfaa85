"""The DeepSpeed engine around a draft head, in each of the processes that train it."""

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from polybasic.train.processes import num_processes
from polybasic.train.settings import HeadSettings

_HEAD_ZERO_STAGE = 2
"""The highest: a head is small beside its target, and evaluations need it whole."""


def start_engine(module: nn.Module, settings: HeadSettings) -> Any:
    """Wrap `module` into a DeepSpeed engine with AdamW, clipping and the learning rate's schedule.

    The module is converted to the settings' dtype in place. Gradients are averaged over the
    processes. Stage 3 of ZeRO is the target's (`load_sharded_target`); the head has stage 2 then.
    Call inside `process_group`.
    """
    deepspeed = quiet_deepspeed()
    config = {
        "train_micro_batch_size_per_gpu": settings.batch_size // num_processes(),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.clip_grad_norm,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": settings.learning_rate,
                "betas": list(settings.adam_betas),
                "weight_decay": settings.weight_decay,
                "torch_adam": True,  # DeepSpeed's own is compiled at first use, for a minute
            },
        },
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        "zero_optimization": {"stage": min(settings.zero_stage, _HEAD_ZERO_STAGE)},
        "steps_per_print": None,
    }
    factor = learning_rate_factor(settings.warmup_steps, settings.num_steps)
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=[each for each in module.parameters() if each.requires_grad],
        config=config,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
        dist_init_required=False,
    )
    return engine


def quiet_deepspeed() -> Any:
    """DeepSpeed, set to log errors only and to compile nothing."""
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # it calls what torch is about to rename
    warnings.filterwarnings("ignore", r"`torch\.distributed", FutureWarning)
    # gloo does without this on a CPU, and building it takes a compiler and a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def learning_rate_factor(
    warmup_steps: int, num_steps: int, decay_share: float = 1.0
) -> Callable[[int], float]:
    """Linear warm-up, then linear decay that would reach zero in step `num_steps`.

    Args:
        warmup_steps: of the warm-up.
        num_steps: of the training.
        decay_share: of the steps: the last ones, in which the factor falls; at most those after
            the warm-up.
    """
    num_falling = min(num_steps - warmup_steps, max(1, round(decay_share * num_steps)))

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return max(0.0, min(1.0, (num_steps - step) / num_falling))

    return factor
