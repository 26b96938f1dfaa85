"""A checkpoint in 4 bits by rounding to the nearest code: seconds, and no calibration."""

from pathlib import Path

import torch

from polybasic.chain.errors import UserError
from polybasic.chain.formats.awq import CODES_PER_WORD, round_to_nearest
from polybasic.chain.formats.checkpoint import load_tensors
from polybasic.chain.formats.config import read_config
from polybasic.chain.formats.files import whole_folder
from polybasic.chain.formats.lineage import QUANTIZED_FROM_KEY, weights_digest
from polybasic.chain.formats.names import layer_linears
from polybasic.chain.formats.origin import ORIGIN_KEY
from polybasic.chain.formats.quantization import GROUP_SIZE, QUANTIZATION_CONFIG
from polybasic.chain.progress import tracked
from polybasic.quantize.awq import write_checkpoint


def round_checkpoint(source: Path, out: Path) -> None:
    """Write a 4-bit copy of a checkpoint to the folder `out`, whole or not at all.

    Linears of the decoder layers are rounded, each group of 128 inputs between its own smallest and
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
    linears = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(config.decoder.num_layers)
        for group in layer_linears(config.decoder).values()
        for name, shape in group.items()
    }
    for name, (out_size, in_size) in linears.items():
        if in_size % GROUP_SIZE or out_size % CODES_PER_WORD:
            raise UserError(
                "linear does not divide into groups",
                f"{name}.weight [{out_size}, {in_size}] in {source}",
                f"out must be a multiple of {CODES_PER_WORD} and in of {GROUP_SIZE}",
            )
    tensors = load_tensors(source)
    for name in tracked(list(linears), f"rounding {source.name} to 4 bits"):
        packed = round_to_nearest(tensors.pop(f"{name}.weight")).pack(name)
        tensors |= zip(
            (f"{name}.{part}" for part in ("qweight", "qzeros", "scales")), packed, strict=True
        )
    # a mapping of the source's file must not be what is written
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    content = {
        **config.content,
        "quantization_config": QUANTIZATION_CONFIG,
        ORIGIN_KEY: {QUANTIZED_FROM_KEY: weights_digest(source)},
    }
    with whole_folder(out) as folder, torch.inference_mode():
        write_checkpoint(tensors, content, source, folder)
