"""The target in 4 bits by AWQ, written as an ordinary AutoAWQ checkpoint."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.quantization import quantization_config
from polybasic.chain.formats.checkpoints.writing_checkpoints import write_checkpoint
from polybasic.chain.formats.files import whole_folder
from polybasic.chain.formats.lineage import origin_of_copy
from polybasic.chain.formats.origin import ORIGIN_KEY
from polybasic.quantize.calibration import calibration_samples
from polybasic.quantize.limits import check_quantizable
from polybasic.quantize.models import load_target
from polybasic.quantize.search import search_and_round
from polybasic.quantize.settings import QuantizeSettings


def quantize_target(
    target: Path,
    samples: Sequence[Sequence[int]],
    settings: QuantizeSettings,
    seed: int,
    out: Path,
) -> None:
    """Write the target's 4-bit copy to the folder `out`, whole or not at all.

    Keys and values keep the target's scale, so that both can share one cache: AWQ's scaling between
    v_proj and o_proj is left out. The scales of the other linears are folded into norms and up
    projections. Linears of the decoder layers are quantized, everything else is float16. The config
    records the digest of the source weights.

    Args:
        target: checkpoint folder.
        samples: token-id rows of any length; `calibration_samples` chooses and cuts them.
        settings: group size, and number and length of the calibration samples.
        seed: of that choice; the search itself is deterministic.
        out: folder to write; an older one of this name is replaced.

    Raises:
        UserError: an unsupported or quantized target, linears that do not divide into groups,
            weights beyond float16, too little data, token ids outside of the vocabulary, or a
            full disk.
    """
    file = read_config(target)
    config, group_size = file.content, check_quantizable(file, settings)
    check_token_ids(samples, config["vocab_size"], target)
    rows = calibration_samples(
        samples, settings.num_calibration_samples, settings.calibration_tokens, seed
    )
    model = load_target(target)
    _check_weights(model, target)
    search_and_round(model, rows, group_size)
    dtype_key = "dtype" if "dtype" in config else "torch_dtype"
    quantized = {
        **config,
        dtype_key: "float16",
        "quantization_config": quantization_config(group_size),
        ORIGIN_KEY: origin_of_copy(file),
    }
    with whole_folder(out) as folder:
        write_checkpoint(_stored_tensors(model, target), quantized, target, folder)


def check_token_ids(rows: Sequence[Sequence[int]], vocab_size: int, target: Path) -> None:
    """Refuse rows with token ids that the target does not have.

    Raises:
        UserError: the first token id outside of the vocabulary.
    """
    for row in rows:
        for token_id in row:
            if not 0 <= token_id < vocab_size:
                raise UserError(
                    "token id outside of the vocabulary",
                    f"{token_id}, {target} has {vocab_size} tokens",
                    "encode the conversations with the target's own tokenizer",
                )


def _stored_tensors(model: PreTrainedModel, target: Path) -> dict[str, Tensor]:
    tied = set(model.all_tied_weights_keys)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name not in tied:
            _check_float16(name, tensor, target)
            tensors[name] = tensor.half() if tensor.is_floating_point() else tensor
    return tensors


def _check_weights(model: PreTrainedModel, target: Path) -> None:
    """Refuse weights that could not be written, before hours of search."""
    for name, parameter in model.named_parameters():
        _check_float16(name, parameter, target)


def _check_float16(name: str, tensor: Tensor, target: Path) -> None:
    if tensor.is_floating_point() and not torch.isfinite(tensor.half()).all():
        raise UserError(
            "weight does not fit float16",
            f"{name} in {target} reaches {tensor.abs().max():.3g}",
            "AutoAWQ's format needs float16; this target cannot be an intermediate",
        )
