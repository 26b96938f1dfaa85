"""`polybasic doctor`: what this machine and this installation offer."""

import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processor import num_cores, processor_flags, processor_name
from polybasic.chain.base.terminal import say
from polybasic.chain.kernels.cpu.native import describe_kernels

_PACKAGES = (
    "polybasic",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "datasets",
    "deepspeed",
    "autoawq",
    "wandb",
)
_EXTRAS = {
    "train": ("datasets", "pyarrow", "peft", "deepspeed", "accelerate", "wandb"),
    "serve": ("fastapi", "uvicorn", "prometheus_client", "markdown_it"),
    "quantize": ("awq", "accelerate", "datasets", "pyarrow"),
    "gguf": ("gguf",),
    "dev": ("pytest", "hypothesis", "zstandard", "mypy", "importlinter"),
}
_CPU_FLAGS = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16"),
)


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print versions, device, kernels, threads, extras, free disk."""
    findings = _findings()
    if as_json:
        typer.echo(json.dumps(findings, indent=2))
        return
    for name, value in findings.items():
        if name == "products":
            value = _shown_products(value)
        elif isinstance(value, dict):
            value = ", ".join(f"{key} {entry}" for key, entry in value.items())
        say(f"{name:<12} {value}", sys.stdout, indent=13)
    say("next: polybasic generate MODEL.gguf -p 'Hello', or polybasic recipes ls")


def _findings() -> dict[str, Any]:
    import torch

    from polybasic.chain.formats.files import free_bytes
    from polybasic.chain.kernels.selection import describe_gpu_kernels

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: _version(name) for name in _PACKAGES},
        "extras": {name: _extra_state(modules) for name, modules in _EXTRAS.items()},
        "cpu": _cpu(),
        "kernels": _kernels(describe_kernels),
        "gpu kernels": _kernels(describe_gpu_kernels),
        "executors": _kernels(_executors),
        "products": _products(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "device": ", ".join(gpus) or "cpu (no CUDA device found)",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.1f} GB",
        "free disk": f"{free_bytes(Path()) / 1e9:.1f} GB in {Path().absolute()}",
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _extra_state(modules: tuple[str, ...]) -> str:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return f"lacks {' '.join(missing)}" if missing else "whole"


def _kernels(describe: Callable[[], str]) -> str:
    try:
        return describe()
    except UserError as error:
        return f"none ({error})"


def _executors() -> str:
    """What runs models here, by dtype; loads the kernels, and compiles them if there are none."""
    from polybasic.chain.kernels.selection import executors_by_dtype
    from polybasic.deploy.runtime.hardware import device_named

    found = executors_by_dtype(device_named())
    return ", ".join(f"{dtype}: {executor}" for dtype, executor in found.items())


def _products() -> dict[str, Any]:
    """How fast PyTorch multiplies in each dtype on this CPU, and what is chosen by that."""
    import torch

    from polybasic.chain.base.processes.group import process_device
    from polybasic.chain.kernels.product_times import (
        multiplies_fast,
        name_of,
        product_times,
        training_dtype,
    )

    times = product_times()
    chosen = {
        "train.dtype": name_of(training_dtype(process_device())),
        "quantize": "float32",
    }
    return {
        "milliseconds": {name: asdict(timing) for name, timing in times.items()},
        "gflops": {
            name: {"forward": timing.forward_gflops, "backward": timing.backward_gflops}
            for name, timing in times.items()
        },
        "fast": [name for name in times if multiplies_fast(getattr(torch, name))],
        "auto": chosen,
    }


def _shown_products(products: dict[str, Any]) -> str:
    """A line for each dtype, then what is chosen."""
    lines = ["GFLOP/s of PyTorch on one core: forward, backward"]
    for name, gflops in products["gflops"].items():
        milliseconds = products["milliseconds"][name]
        is_fast = "" if name in products["fast"] else "  slow"
        lines.append(
            f"{name:<9} {gflops['forward']:6.0f} {gflops['backward']:6.0f}  "
            f"({milliseconds['forward']:.2f} and {milliseconds['backward']:.2f} ms){is_fast}"
        )
    lines += [f"{name} {dtype}" for name, dtype in products["auto"].items()]
    lines.append("plan.dtype, bench.dtype, hf_generate: by the target and its kernels")
    return f"\n{'':<13}".join(lines)


def _cpu() -> str:
    """Model name and the instruction sets that matter here, where the system tells them."""
    name, flags = processor_name(), processor_flags()
    found = [flag for flag in _CPU_FLAGS if flag in flags]
    return f"{name} ({', '.join(found) or 'no AVX2'})" if flags else name
