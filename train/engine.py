"""The DeepSpeed engine around a draft head, in each of the processes that train it."""

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from polybasic.chain.base.processes.group import is_first_process, num_processes
from polybasic.chain.kernels.product_times import DTYPES
from polybasic.train.head_optimizer import HeadOptimizer, matrices_between_states
from polybasic.train.settings import HeadSettings

_HEAD_ZERO_STAGE = 2
"""The highest: a head is small beside its target, and evaluations need it whole."""
_MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, as torch and DeepSpeed name them


def start_engine(module: nn.Module, settings: HeadSettings) -> Any:
    """Wrap `module` into a DeepSpeed engine with optimizer, clipping and the rate's schedule.

    The module is converted to the settings' dtype in place. Gradients are averaged over the
    processes. AdamW's state is partitioned by ZeRO's stages 1 and 2; Muon, whose steps are of whole
    matrices, and stage 0 keep it whole in each process (`HeadOptimizer`). Stage 3 is the target's
    (`load_sharded_target`); the head has stage 2 then. Call inside `process_group`.
    """
    deepspeed = quiet_deepspeed()
    weights = [each for each in module.parameters() if each.requires_grad]
    stage, optimizer = min(settings.zero_stage, _HEAD_ZERO_STAGE), None
    if settings.optimizer == "muon":
        stage = 0
    if stage == 0:
        module.to(DTYPES[settings.dtype])
        matrices = matrices_between_states(module) if settings.optimizer == "muon" else []
        taken = {id(each) for each in matrices}
        others = [each for each in weights if id(each) not in taken]
        optimizer = HeadOptimizer(matrices, others, settings)
    config = {
        "train_micro_batch_size_per_gpu": settings.batch_size // num_processes(),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.clip_grad_norm,
        "bf16": {"enabled": optimizer is None and settings.dtype == "bfloat16"},
        "zero_optimization": {"stage": stage},
        "steps_per_print": None,
    }
    if optimizer is None:
        config["optimizer"] = {
            "type": "AdamW",
            "params": {
                "lr": settings.learning_rate,
                "betas": list(settings.adam_betas),
                "weight_decay": settings.weight_decay,
                "torch_adam": True,  # DeepSpeed's own is compiled at first use, for a minute
            },
        }
    factor = learning_rate_factor(settings.warmup_steps, settings.num_steps)
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=weights,
        optimizer=optimizer,
        config=config,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
        dist_init_required=False,
    )
    return engine


def engine_state(engine: Any) -> dict[str, Tensor]:
    """What an engine has learned, after at least one step; all processes call this together.

    Returns:
        Of each trained parameter `NAME` the whole float32 tensor `NAME` and its moments,
        `NAME/exp_avg` and `NAME/exp_avg_sq` or `NAME/momentum_buffer`, on the CPU, whatever the
        number of processes; empty but in the first one.
    """
    state: dict[str, Tensor] = {}
    for name, weight in _trained(engine):
        for key in _learned_keys(engine, weight):
            whole = _whole(engine, weight, key)  # a sum over the processes where it is partitioned
            if is_first_process():
                state[f"{name}/{key}" if key else name] = whole.cpu()
    return state


def set_engine_state(engine: Any, path: Path, step: int) -> None:
    """Bring a new engine to where `engine_state` was taken, in any number of processes.

    Args:
        engine: of the same module.
        path: a safetensors file of that state.
        step: after how many steps it was taken.

    Raises:
        KeyError: a tensor of a parameter is missing.
    """
    # optimizers make their state in the first step; what this one changes is overwritten
    engine.backward(sum(weight.sum() * 0 for _, weight in _trained(engine)))
    engine.step()
    with safe_open(path, "pt") as stored:
        for name, weight in _trained(engine):
            weight.data.copy_(stored.get_tensor(name))
            for key in _learned_keys(engine, weight):
                whole = stored.get_tensor(f"{name}/{key}" if key else name)
                _set_whole(engine, weight, key, whole.to(weight.device))
    for state in engine.optimizer.state.values():
        if "step" in state:  # Muon counts none
            state["step"].fill_(step)
    engine.lr_scheduler.last_epoch = step - 1
    engine.lr_scheduler.step()


def _trained(engine: Any) -> Iterator[tuple[str, nn.Parameter]]:
    for name, weight in engine.module.named_parameters():
        if weight.requires_grad:
            yield name, weight


def _learned_keys(engine: Any, weight: nn.Parameter) -> list[str]:
    """Of a parameter in float32, "", and of its moments."""
    if isinstance(engine.optimizer, HeadOptimizer):
        return list(engine.optimizer.learned(weight))
    return ["", *_MOMENTS]


def _whole(engine: Any, weight: nn.Parameter, key: str) -> Tensor:
    """A parameter in float32, or one of its moments."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if isinstance(engine.optimizer, HeadOptimizer):
        return engine.optimizer.learned(weight)[key]
    if not key:
        return safe_get_full_fp32_param(weight)
    return safe_get_full_optimizer_state(weight, key)


def _set_whole(engine: Any, weight: nn.Parameter, key: str, value: Tensor) -> None:
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    if isinstance(engine.optimizer, HeadOptimizer):
        engine.optimizer.learned(weight)[key].copy_(value)
    elif not key:
        safe_set_full_fp32_param(weight, value)
    else:
        safe_set_full_optimizer_state(weight, value, key)


def quiet_deepspeed() -> Any:
    """DeepSpeed, set to log errors only and to compile nothing."""
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # it calls what torch is about to rename
    warnings.filterwarnings("ignore", r"`torch\.distributed", FutureWarning)
    # gloo does without this on a CPU, and building it takes a compiler and a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def learning_rate_factor(warmup_steps: int, num_steps: int) -> Callable[[int], float]:
    """Linear warm-up, then linear decay that would reach zero in step `num_steps`."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return max(0.0, (num_steps - step) / (num_steps - warmup_steps))

    return factor
