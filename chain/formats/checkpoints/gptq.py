"""Checkpoints in GPTQ's format of 4 bits, written anew in AutoAWQ's: the same numbers.

#   I = in features, O = out features, G = groups of one input row

Source: AutoGPTQ 0.7.1, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py. No torch but where it
is needed.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.progress import tracked
from polybasic.chain.base.readable import alternatives
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.formats.checkpoints.config import ConfigFile, read_config
from polybasic.chain.formats.checkpoints.quantization import BITS, GROUP_SIZES, quantization_config
from polybasic.chain.formats.files import whole_folder
from polybasic.chain.formats.kept import MODELS, folder_stamp, kept_folder

if TYPE_CHECKING:
    from torch import Tensor

_METHOD = "gptq"
_PACKED = ("qweight", "qzeros")
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "bits": (BITS,),
    "group_size": GROUP_SIZES,
    "lm_head": (None, False),
    "checkpoint_format": (None, "gptq", "gptq_v2"),
    "dynamic": (None, {}),
}
_EXACT_ZEROS = "gptq_v2"
"""The format whose zeros are stored as they are, and not less one."""


def is_gptq(folder: Path) -> bool:
    """Whether a checkpoint says that it is in GPTQ's format.

    Raises:
        UserError: as `read_config`.
    """
    found = read_config(folder).content.get("quantization_config")
    return isinstance(found, dict) and str(found.get("quant_method")).lower() == _METHOD


def as_awq(folder: Path) -> Path:
    """The folder in the cache with the checkpoint in AutoAWQ's format, made unless it is there.

    Raises:
        UserError: other numbers of bits or inputs a group, inputs in another order than that of
            their groups (`desc_act`), a damaged file, or as `kept_folder`.
    """
    name = f"{folder.resolve().name}-awq"
    return kept_folder(MODELS, name, folder_stamp(folder), lambda out: _convert(folder, out))


def _convert(source: Path, out: Path) -> None:
    import torch

    from polybasic.chain.formats.checkpoints.writing_checkpoints import write_checkpoint

    config = read_config(source)
    settings = _checked(config)
    group_size, is_exact = settings["group_size"], settings["checkpoint_format"] == _EXACT_ZEROS
    tensors: dict[str, Tensor] = {}
    for name, tensor in tracked(list(load_tensors(source).items()), f"repacking {source.name}"):
        part = name.rpartition(".")[2]
        if part == "g_idx":
            groups = torch.arange(len(tensor)) // group_size
            if not torch.equal(tensor.long(), groups):
                raise UserError(
                    "inputs of a weight in another order than that of its groups",
                    f"{name} in {source}",
                    "name a checkpoint that was quantized with desc_act false",
                )
        else:
            # a mapping of the source's file must not be what is written
            tensors[name] = _repacked(tensor, part, is_exact) if part in _PACKED else tensor.clone()
    content = {**config.content, "quantization_config": quantization_config(group_size)}
    with whole_folder(out) as partial:
        write_checkpoint(tensors, content, source, partial)


def _checked(config: ConfigFile) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(_ALLOWED) | config.content["quantization_config"]
    for key, values in _ALLOWED.items():
        if found[key] not in values:
            raise UserError(
                "unsupported quantization",
                f"quantization_config.{key} {found[key]!r} in {config.path}",
                f"of GPTQ's format only {alternatives(map(repr, values))} is read",
            )
    return found


def _repacked(words: "Tensor", part: str, has_exact_zeros: bool) -> "Tensor":
    """AutoAWQ's words of GPTQ's: qweight int32 [I / 8, O], qzeros int32 [G, O / 8].

    Eight codes of neighbouring inputs of an output, or eight zeros of neighbouring outputs, lie in
    a word, the first one lowest.
    """
    import torch

    from polybasic.chain.formats.checkpoints.awq import CODES_PER_WORD, pack_words

    dim = 1 if part == "qweight" else 2
    shifts = torch.arange(0, CODES_PER_WORD * BITS, BITS, dtype=torch.int32)
    shifts = shifts[:, None] if part == "qweight" else shifts
    codes = (words.unsqueeze(dim) >> shifts) & (2**BITS - 1)
    if part == "qweight":
        return pack_words(codes.flatten(0, 1))
    return pack_words((codes.flatten(1) + (not has_exact_zeros)) & (2**BITS - 1))
