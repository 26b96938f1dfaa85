"""A tiny chain whose members differ, in every place where its rounds can run."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polybasic.chain.formats.package import Part
from polybasic.chain.formats.plan import AdaptiveFlush, Flush, Plan, Rule, Tree
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.runtime.request import Request
from polybasic.deploy.runtime.rounds.sampling import Sampling
from tests.conftest import FourChainParts, package_around, write_draft, write_target

NUM_NEW_TOKENS = 100
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]

TREE = Tree(depth=2, top_k=3, rows=8)
ADAPTIVE = AdaptiveFlush(break_even=0.25, acceptance=(0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9))


def three(rule: Rule, adaptive: AdaptiveFlush | None = None) -> Plan:
    flush = {"target": Flush(length=3, adaptive=adaptive)}
    return Plan(members=("target", "near", "copy"), tree=TREE, flush=flush, rule=rule)


PLANS = {
    "head": Plan(members=("target", "head"), tree=TREE),
    "two": Plan(members=("target", "copy"), tree=TREE),
    "independent": Plan(members=("target", "copy"), tree=TREE, rule="block"),
    "coupled": three("coupled"),
    "block": three("block"),
    "token": three("token"),
    "adaptive": three("token", ADAPTIVE),
}


@dataclass(frozen=True)
class Where:
    """Where rounds run, and by which kernels."""

    device: str
    kernels: str
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.device}-{self.kernels}-{self.dtype}"


needs_gpu = pytest.mark.gpu(needed=True)
HOST, DEVICE = Where("cpu", "auto"), Where("cpu", "device")
ROUNDED = [Where("cpu", "device", "bfloat16")]
GPU = [Where("cuda", "auto", dtype) for dtype in ("float32", "bfloat16", "float16")]
PLACES = [HOST, DEVICE, pytest.param(GPU[0], marks=needs_gpu)]
ROUNDED_PLACES = [*ROUNDED, *(pytest.param(place, marks=needs_gpu) for place in GPU[1:])]

ChainAt = Callable[[Where], Chain]


def write_noisy_chain(models: Path, **changes: Any) -> Path:
    """A chain of a target, two noisy copies of it, one to verify and one to draft, and a head.

    Args:
        models: an empty folder; the chain will lie in it.
        changes: of the target's shape, as LlamaConfig names it.
    """
    write_target(models / "target", **changes)
    write_draft(models / "head", models / "target")
    parts = [Part("head", "drafter", "eagle2", models / "head")]
    for name, role, noise in (("near", "intermediate", 0.1), ("copy", "drafter", 0.05)):
        write_noisy_copy(models / name, models / "target", noise)
        parts.append(Part(name, role, "decoder", models / name))  # type: ignore[arg-type]
    parts.sort(key=lambda part: part.role != "intermediate")
    package_around(models / "chain", models / "target", parts, PLANS["block"], copy_target=True)
    return models / "chain"


def write_noisy_copy(folder: Path, target: Path, noise: float) -> None:
    """A model in which a share of each weight is replaced by other numbers of the same size."""
    shutil.copytree(target, folder)
    path = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(1)

    def disturbed(weight: Tensor) -> Tensor:
        if weight.ndim == 1:
            return weight
        other = torch.randn(weight.shape, generator=generator) * weight.float().std()
        return ((1 - noise**2) ** 0.5 * weight + noise * other).to(weight.dtype)

    weights = {name: disturbed(weight) for name, weight in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})


def write_four_and_a_copy(models: Path, made: Path) -> Path:
    """A chain of four, with a noisy copy of the target besides, which drafts.

    Args:
        models: as the fixture of the same name wrote them.
        made: an empty folder; the chain will lie in it.
    """
    names = ("target", "intermediate", "draft", "small_target", "small", "small_draft")
    parts = FourChainParts(*(models / name for name in names))
    write_noisy_copy(made / "copy", models / "target", 0.2)
    copy = Part("copy", "drafter", "decoder", made / "copy")
    parts.package(made / "chain", parts=[*parts.parts, copy])
    return made / "chain"


@contextmanager
def chains_of(folder: Path) -> Iterator[ChainAt]:
    """Loads a chain in each place once, and lets it run there by the kernels of the place."""
    chains: dict[Where, Chain] = {}
    with pytest.MonkeyPatch.context() as patch:

        def at(where: Where) -> Chain:
            patch.setenv("POLYBASIC_KERNELS", where.kernels)
            if where not in chains:
                chains[where] = load_chain(folder, device=where.device, dtype=where.dtype)
            return chains[where]

        yield at


def answer(
    chain: Chain, plan: Plan, sampling: Sampling, prompt: Sequence[int] = PROMPT
) -> list[int]:
    """New tokens, by the engine."""
    request = Request(list(prompt), NUM_NEW_TOKENS, sampling, frozenset(), plan)
    return [token for tokens in chain.engine.run(request) for token in tokens]
