"""The DeepSpeed engine around a draft head, in one process on a CPU or one GPU."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from polybasic.chain.errors import UserError
from polybasic.train.settings import HeadSettings

_SINGLE_PROCESS = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


@contextmanager
def single_process() -> Iterator[None]:
    """A process group of one without a launcher; no port is opened, the environment is restored.

    Raises:
        UserError: a launcher has started several processes.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "training runs in one process",
            f"WORLD_SIZE = {os.environ['WORLD_SIZE']}",
            "start it without a launcher",
        )
    wanted = dict(_SINGLE_PROCESS)
    if not torch.cuda.is_available():
        wanted["DS_ACCELERATOR"] = "cpu"
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                "nccl" if torch.cuda.is_available() else "gloo",
                store=torch.distributed.HashStore(),
                rank=0,
                world_size=1,
            )
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def start_engine(module: nn.Module, settings: HeadSettings) -> Any:
    """Wrap `module` into a DeepSpeed engine with AdamW, clipping and the learning rate's schedule.

    The module is converted to the settings' dtype in place. Call inside `single_process`.
    """
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # one process shares memory with nobody, and building this takes a compiler and a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": settings.batch_size,
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
        "zero_optimization": {"stage": settings.zero_stage},
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


def learning_rate_factor(warmup_steps: int, num_steps: int) -> Callable[[int], float]:
    """Linear warm-up, then linear decay that would reach zero in step `num_steps`."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return max(0.0, (num_steps - step) / (num_steps - warmup_steps))

    return factor
