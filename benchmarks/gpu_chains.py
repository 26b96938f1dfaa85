"""Chains in full size from a small folder: grown into the device's memory, without large files.

A grown chain's folder holds all that a chain's does, but of the weights only their headers: behind
them the files are holes, which take no room on the disk. Loading asks for tensors by file and name,
and is given those in the memory of the device.
"""

import json
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from polybasic.chain.formats.config import DecoderConfig
from polybasic.chain.formats.files import sha256_of_object
from polybasic.chain.model import weights as weights_module
from polybasic.chain.model.reference import quiet_transformers
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.bench.baselines import TransformersBaseline
from polybasic.recipes.growth.chain import grow_chain
from polybasic.recipes.growth.shapes import GrownShape

_WEIGHTS = "model.safetensors"
_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
}


class KeptWeights:
    """The weights of a grown chain, by member and name, in a device's memory.

    Args:
        folder: of the chain.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.members: dict[str, dict[str, Tensor]] = {}

    def write(self, folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> dict[str, str]:
        """Keep a member's tensors and write their headers; as `grow_chain` asks for it."""
        kept = self.members[folder.name] = {name: one.contiguous() for name, one in tensors}
        described = write_holes(folder / _WEIGHTS, kept)
        return {_WEIGHTS: sha256_of_object(described)}

    def of(self, path: Path) -> Mapping[str, Tensor] | None:
        """The tensors of a weight file; None for a file of another chain."""
        path = path.resolve()
        return self.members.get(path.parent.name) if path.parent.parent == self.folder else None


def write_holes(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """A safetensors file that has the headers of tensors and no content; the headers."""
    headers: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + prod(tensor.shape) * tensor.itemsize
        dtype, shape = _DTYPES[tensor.dtype], list(tensor.shape)
        headers[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    written = json.dumps(headers).encode()
    written += b" " * (-len(written) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(written)) + written)
        file.truncate(file.tell() + end)
    return headers


@contextmanager
def serving(kept: Sequence[KeptWeights]) -> Iterator[None]:
    """Let the loaders read kept weights; more of them may be added to `kept` inside."""
    read_files = weights_module.read_tensors

    def read(path: Path, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        found = next((one for one in (chain.of(path) for chain in kept) if one is not None), None)
        if found is None:
            return read_files(path, names)
        return {name: found[name] for name in (found if names is None else names)}

    weights_module.read_tensors = read
    try:
        yield
    finally:
        weights_module.read_tensors = read_files


@dataclass(frozen=True)
class Grown:
    """A small chain in full size.

    Attributes:
        chain: loaded, with room for the longest context.
        kept: what it was loaded from.
        seconds: that growing and loading took.
        said: what loading told people.
    """

    chain: Chain
    kept: KeptWeights
    seconds: dict[str, float]
    said: list[str]

    def hf_generate(self) -> TransformersBaseline:
        """transformers' own loop over the target, of the tensors that are kept."""
        target = self.chain.engine.models.target
        return KeptBaseline(
            self.chain.target_folder,
            self.kept.members[self.chain.target_folder.name],
            target.dtype,
            target.device,
            self.chain.stop_tokens,
        )


def grow_and_load(
    small: Path,
    shape: GrownShape,
    name: str,
    out: Path,
    serve: list[KeptWeights],
    device: torch.device,
    dtype: str,
    context_tokens: int,
) -> Grown:
    """Grow a small chain into a device's memory and load it there; no token ends an answer.

    Args:
        small: its folder.
        name: labels the chain as grown.
        out: a folder for what is small of the grown one.
        serve: as given to `serving`; the grown weights are added.
        context_tokens: of an answer with all before it; may be more than the chain is declared
            for, behind which no text means anything.

    Raises:
        UserError: as `grow_chain` and `load_chain`.
    """
    kept, said = KeptWeights(out), list[str]()
    begin = time.perf_counter()
    grow_chain(small, shape, name, out, device=device, write_weights=kept.write)
    serve.append(kept)
    grown = time.perf_counter()
    chain = load_chain(
        out,
        device=str(device),
        dtype=dtype,
        context_tokens=context_tokens,
        digests=False,
        beyond_declared=True,
        say=said.append,
    )
    # text behind the end means little, and answers are as long as those of large models
    chain.stop_tokens = frozenset()
    seconds = {"growing": grown - begin, "loading": time.perf_counter() - grown}
    return Grown(chain, kept, seconds, said)


class KeptBaseline(TransformersBaseline):
    """`generate` of transformers over tensors that lie in memory.

    Args:
        target: the folder of the config.
        tensors: of the checkpoint; those of the right dtype are not copied.
    """

    def __init__(
        self,
        target: Path,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        stop_tokens: frozenset[int],
    ) -> None:
        with quiet_transformers(), init_empty_weights(include_buffers=False):
            config = AutoConfig.from_pretrained(target)
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="sdpa"
            )
        moved = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
        model.load_state_dict(moved, assign=True)
        self.model: Any = model.to(device).eval()
        self.model.generation_config = GenerationConfig()
        self.stop_tokens = stop_tokens


def rehearsal_shape(small: DecoderConfig, num_kv_heads: int) -> GrownShape:
    """A shape that is little wider than a small model, for a rehearsal without a GPU.

    Args:
        num_kv_heads: of twice as many query heads as the small model has.
    """
    return GrownShape(
        num_layers=small.num_layers,
        hidden_size=small.hidden_size + 128,
        intermediate_size=small.intermediate_size + 128,
        num_heads=2 * small.num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=small.head_dim,
        vocab_size=small.vocab_size + 32,
    )
