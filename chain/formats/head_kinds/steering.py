"""Steering of an independent model that drafts: the verifier's states bias its layers.

After Berdoz et al. (arXiv 2511.09844). A member of this kind holds the map from states to vectors
alone; the model that it steers is another member, in whose place it drafts.
"""

from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.decoder_config import (
    DecoderConfig,
    HeadConfig,
    ModelSizes,
    Shape,
)
from polybasic.chain.formats.head_kinds.kind import Content, HeadKind, is_whole, model_config

STEERED_KEY = "drafter_sha256"
"""In the records of its config.json: the weights of the model that it steers."""
DOWN, UP = "down", "up"
"""Names of what is stored, without `.weight`."""
_RANK, _LAYERS, _SIZE = "steering_rank", "drafter_num_layers", "drafter_hidden_size"
_MAX = 1 << 24


def _fields(content: Content, where: str) -> dict[str, Any]:
    found = {key: content.get(key) for key in (_RANK, _LAYERS, _SIZE)}
    for key, value in found.items():
        if not is_whole(value, range(1, _MAX + 1)):
            raise UserError(
                "malformed steering", f"{where} {key} {value!r}", "train the steering again"
            )
    return {
        "adapter_rank": found[_RANK],
        "steered_layers": found[_LAYERS],
        "steered_size": found[_SIZE],
    }


def _tensors(config: HeadConfig) -> dict[str, Shape]:
    rank = config.adapter_rank
    return {
        f"{DOWN}.weight": (rank, config.hidden_size),
        f"{UP}.weight": (config.steered_layers * config.steered_size, rank),
    }


def steering_config(
    sizes: ModelSizes, rank: int, num_layers: int, hidden_size: int, dtype: str
) -> dict[str, Any]:
    """The content of config.json, but for what it was trained for.

    Args:
        sizes, dtype: as `model_config`.
        rank: of the map.
        num_layers, hidden_size: of the model that is steered.
    """
    return {
        _RANK: rank,
        _LAYERS: num_layers,
        _SIZE: hidden_size,
        **model_config(sizes, dtype),
    }


def check_steered(config: HeadConfig, drafter: DecoderConfig, where: str) -> None:
    """Check that a steering has vectors for each layer of a model.

    Args:
        where: the steering's config, for errors.

    Raises:
        UserError: it has not.
    """
    wanted = drafter.num_layers, drafter.hidden_size
    if (config.steered_layers, config.steered_size) != wanted:
        raise UserError(
            "steering of another model",
            f"{where} {_LAYERS} {config.steered_layers}, {_SIZE} {config.steered_size}; the model "
            f"has {wanted[0]} layers of {wanted[1]}",
            "train the steering for this model",
        )


STEERING = HeadKind(
    name="steering",
    title="Steering",
    tensors=_tensors,
    load="polybasic.chain.model.steering:load_steering",
    drafter="polybasic.deploy.runtime.drafters.steering:SteeredDrafter",
    steers=True,
    fields=_fields,
)
