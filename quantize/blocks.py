"""A checkpoint in blocks of GGML's Q4_0 without calibration: small enough to run below another one.

All matrices are rounded, embedding and output projection too: of small models with large
vocabularies these are a third of the weights, and a draft that one of 16 codes changes costs a
token that is drafted again, nothing else.

#   O = out features, I = in features, B = bytes of a row
#   N = blocks of one row, i = inputs of a block
"""

from math import prod
from pathlib import Path

import torch
from torch import Tensor

from polybasic.chain.base.progress import tracked
from polybasic.chain.formats.checkpoints.block_types import BLOCK_TYPES, typed_name
from polybasic.chain.formats.checkpoints.blocks import BlockWeight
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors, stored_tensors
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.writing_checkpoints import write_checkpoint
from polybasic.chain.formats.files import whole_folder
from polybasic.chain.formats.lineage import origin_of_copy
from polybasic.chain.formats.origin import ORIGIN_KEY
from polybasic.quantize.limits import check_rows

KIND = BLOCK_TYPES["Q4_0"]
MOST_BITS = 5.0
"""Of a weight that is kept as it is stored: fewer make a pass shorter, and drafts hardly worse."""
_LARGEST = (-8.5, -8.0, -7.5, -7.0, 7.0)
"""Codes, counted from that of zero, that a block's largest weight is tried at."""
_WEIGHTS_AT_ONCE = 1 << 20


def is_in_few_bits(folder: Path) -> bool:
    """Whether a checkpoint's matrices take at most `MOST_BITS` bits a weight, scales included, or
    it is in AutoAWQ's format."""
    if read_config(folder).in_4_bits:
        return True
    num_bits = num_weights = 0
    for name, tensor in stored_tensors(folder).items():
        if tensor.ndim == 2:
            _, blocks = typed_name(name)
            num_bits += 8 * tensor.nbytes
            num_weights += prod((tensor if blocks is None else BlockWeight(blocks, tensor)).shape)
    return num_bits <= MOST_BITS * num_weights


def round_to_blocks(source: Path, out: Path) -> None:
    """Write a copy of a checkpoint whose matrices are in blocks of Q4_0, whole or not at all.

    Args:
        source: folder of a checkpoint, dense or in blocks, which are dequantized.
        out: folder to write; an older one of this name is replaced.

    Raises:
        UserError: an architecture that is not run, as `check_rows`, or a full disk.
    """
    config = read_config(source)
    check_rows(config)
    tensors = load_tensors(source)
    matrices = [name for name, tensor in tensors.items() if tensor.ndim == 2]
    with torch.inference_mode():
        # a mapping of the source's file must not be what is written
        written = {name: tensor.clone() for name, tensor in tensors.items() if name not in matrices}
        for name in tracked(matrices, f"rounding {source.name} to 4 bits"):
            written[f"{name}.{KIND.name}"] = blocks_of(tensors.pop(name))
    content = {**config.content, ORIGIN_KEY: origin_of_copy(config)}
    with whole_folder(out) as folder:
        write_checkpoint(written, content, source, folder)


def blocks_of(weight: Tensor) -> Tensor:
    """A matrix [O, I] in blocks, uint8 [O, B].

    Of several scales by which a block's weights are rounded, and then fitted to their codes by
    least squares, each gets that of the smallest square error.
    """
    step = max(1, _WEIGHTS_AT_ONCE // weight.shape[1])
    return torch.cat(
        [_blocks(part.float().unflatten(1, (-1, KIND.size))) for part in weight.split(step)]
    )


def _blocks(weight_ONi: Tensor) -> Tensor:
    largest_ON1 = weight_ONi.gather(2, weight_ONi.abs().argmax(2, keepdim=True))
    best_ON1 = torch.full_like(largest_ON1, torch.inf)
    scale_ON1, codes_ONi = torch.zeros_like(largest_ON1), torch.zeros_like(weight_ONi)
    for code in _LARGEST:
        tried_ON1 = largest_ON1 / code
        found_ONi = _codes(weight_ONi, tried_ON1)
        norm_ON1 = found_ONi.square().sum(2, keepdim=True)
        fitted_ON1 = (found_ONi * weight_ONi).sum(2, keepdim=True) / norm_ON1.clamp(min=1)
        # as it is stored; codes are those of the scale that they are multiplied by
        fitted_ON1 = fitted_ON1.half().float()
        found_ONi = _codes(weight_ONi, fitted_ON1)
        error_ON1 = (found_ONi * fitted_ON1 - weight_ONi).square().sum(2, keepdim=True)
        is_better = error_ON1 < best_ON1
        best_ON1 = torch.where(is_better, error_ON1, best_ON1)
        scale_ON1 = torch.where(is_better, fitted_ON1, scale_ON1)
        codes_ONi = torch.where(is_better, found_ONi, codes_ONi)
    bytes_ONi = (codes_ONi + KIND.zero).to(torch.uint8)
    low, high = bytes_ONi.split(KIND.size // 2, dim=2)
    scales = scale_ON1.half().view(torch.uint8)
    return torch.cat([scales, low | high << 4], dim=2).flatten(1)


def _codes(weight_ONi: Tensor, scale_ON1: Tensor) -> Tensor:
    """Counted from that of zero, in float32; zeros where the scale is 0."""
    inverse_ON1 = torch.where(scale_ON1 == 0, 0.0, 1 / scale_ON1)
    return (weight_ONi * inverse_ON1).round().clamp(-KIND.zero, 2**KIND.bits - 1 - KIND.zero)
