"""A checkpoint as one GGUF file."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import gguf
import numpy as np

from polybasic.chain.base.progress import tracked
from polybasic.chain.formats.checkpoints.checkpoint import stored_tensors
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.gguf.architectures import add_numbers, architecture_of, warnings_of
from polybasic.chain.formats.gguf.tensors import GGUFTensor, Type, tensors_of
from polybasic.chain.formats.gguf.vocabulary import numbers, read_vocabulary

_VALUES = np.dtype(np.float32)
"""Says that shapes count values: those of bytes would be of uint8."""


def write_gguf(
    folder: Path,
    path: Path,
    *,
    tokenizer: Path | None = None,
    name: str | None = None,
    matrices: str | None = None,
    stop: Iterable[int] = (),
) -> tuple[str, ...]:
    """Write a checkpoint; a tensor at a time is in memory.

    Args:
        folder: of the checkpoint.
        path: the file; one that is there is replaced.
        tokenizer: folder of its tokenizer; default: the checkpoint's own.
        name: that llama.cpp shows; default: the file's.
        matrices: GGML's name of the type of matrices ("BF16", "Q4_0"); default: as they are stored,
            in blocks or not, and those in AutoAWQ's 4 bits as Q4_1.
        stop: ids that end an answer, where ids alone are handed over; the texts of tokens are then
            numbers, and no tokenizer is read.

    Returns:
        One line for each thing that llama.cpp does otherwise.

    Raises:
        UserError: a model or a tokenizer that llama.cpp does not have; the disk is full.
    """
    config = read_config(folder)
    architecture = architecture_of(config)
    vocab_size, stop = config.decoder.vocab_size, tuple(stop)
    if stop:
        vocabulary = numbers(vocab_size, stop)
    else:
        vocabulary = read_vocabulary(tokenizer or folder, vocab_size)
    kind = None if matrices is None else gguf.GGMLQuantizationType[matrices]
    tensors = tensors_of(stored_tensors(folder), config, architecture, kind)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name or path.stem)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(_file_type(tensors))
    add_numbers(writer, config)
    vocabulary.add_to(writer)
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name, tensor.shape, _VALUES, tensor.num_bytes, raw_dtype=tensor.type
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tracked(tensors, path.name):
            writer.write_tensor_data(tensor.data())
    finally:
        writer.close()
    return warnings_of(config)


def _file_type(tensors: Sequence[GGUFTensor]) -> gguf.LlamaFileType:
    """llama.cpp's word for the type of most bytes."""
    num_bytes = dict.fromkeys((tensor.type for tensor in tensors), 0)
    for tensor in tensors:
        num_bytes[tensor.type] += tensor.num_bytes
    most = max(num_bytes, key=lambda kind: num_bytes[kind])
    if most is Type.F32:
        return gguf.LlamaFileType.ALL_F32
    # of those with two levels it has several words for one type; M is said of mixtures
    name = f"MOSTLY_{most.name}"
    return gguf.LlamaFileType[name if name in gguf.LlamaFileType.__members__ else f"{name}_M"]
