"""Writes checkpoints made of others: weights, a config, and what else the source has."""

from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from torch import Tensor

from polybasic.chain.formats.checkpoints.checkpoint import checkpoint_files, copy_files, model_files
from polybasic.chain.formats.files import write_json

_SHARD_SIZE = "5GB"


def write_checkpoint(
    tensors: dict[str, Tensor], config: dict[str, Any], source: Path, folder: Path
) -> None:
    """Write a checkpoint's weights (in shards where they are large) and its config.

    Args:
        tensors: by name.
        config: the content of config.json.
        source: checkpoint folder from which tokenizer, generation config and licences are copied.
        folder: to write.
    """
    save_torch_state_dict(tensors, folder, max_shard_size=_SHARD_SIZE)
    write_json(folder / "config.json", config)
    copied = {*checkpoint_files(source)} - {*model_files(source)} | {"generation_config.json"}
    copy_files(source, folder, [name for name in copied if (source / name).is_file()])
