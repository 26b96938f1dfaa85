"""A checkpoint in 4 bits by rounding to the nearest code: seconds, and no calibration."""

from pathlib import Path

import torch

from polybasic.chain.formats.awq import PARTS, round_to_nearest
from polybasic.chain.formats.checkpoint import load_tensors
from polybasic.chain.formats.config import read_config
from polybasic.chain.formats.files import whole_folder
from polybasic.chain.formats.lineage import origin_of_copy
from polybasic.chain.formats.names import linear_shapes
from polybasic.chain.formats.origin import ORIGIN_KEY
from polybasic.chain.formats.quantization import quantization_config
from polybasic.chain.formats.writing_checkpoints import write_checkpoint
from polybasic.chain.progress import tracked
from polybasic.quantize.limits import group_size_of


def round_checkpoint(source: Path, out: Path) -> None:
    """Write a 4-bit copy of a checkpoint to the folder `out`, whole or not at all.

    Linears of the decoder layers are rounded, each group of inputs between its own smallest and
    largest weight; everything else stays as it is stored. AWQ (`quantize_target`) is nearer to the
    model, and takes minutes to hours.

    Args:
        source: folder of a checkpoint that is not quantized.
        out: folder to write; an older one of this name is replaced.

    Raises:
        UserError: an architecture that is not run, linears that do not divide into groups, or a
            full disk.
    """
    config = read_config(source)
    group_size = group_size_of(config)
    linears = [
        f"model.layers.{layer}.{name}"
        for layer in range(config.decoder.num_layers)
        for name in linear_shapes(config.decoder)
    ]
    tensors = load_tensors(source)
    for name in tracked(linears, f"rounding {source.name} to 4 bits"):
        packed = round_to_nearest(tensors.pop(f"{name}.weight"), group_size).pack(name)
        tensors |= zip((f"{name}.{part}" for part in PARTS), packed, strict=True)
    # a mapping of the source's file must not be what is written
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    content = {
        **config.content,
        "quantization_config": quantization_config(group_size),
        ORIGIN_KEY: origin_of_copy(config),
    }
    with whole_folder(out) as folder, torch.inference_mode():
        write_checkpoint(tensors, content, source, folder)
