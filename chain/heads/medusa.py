"""Medusa's and Hydra's heads of others in the layout of a chain, and the config.json of both.

Sources: FasterDecoding/Medusa e2a5d20 (medusa/model/medusa_model.py), zankner/Hydra 7f39cbd
(hydra/model/hydra_heads/mlp_head.py), vLLM 0.9 (vllm/model_executor/models/medusa.py). The first
two write a file of heads alone, and a config.json that names the model and none of its sizes.
"""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.config import head_config, read_config
from polybasic.chain.formats.checkpoints.decoder_config import ModelSizes
from polybasic.chain.formats.checkpoints.draft_vocabulary import OFFSETS, draft_tables
from polybasic.chain.formats.head_kinds.kind import Content, HeadKind, model_config
from polybasic.chain.formats.head_kinds.medusa import HYDRA, MEDUSA, NUM_BLOCKS, NUM_HEADS
from polybasic.chain.heads.checks import check_tensors
from polybasic.chain.kernels.product_times import name_of

Tensors = dict[str, Tensor]

_BASE = "base_model_name_or_path"
_TOKEN_MAP = "token_map"
"""The draft vocabulary as vLLM reads it: a tensor of token ids, in the order of the outputs."""
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")
_PREFIXES = re.compile(r"medusa_heads?\.")
_SPELLINGS = (
    (re.compile(r"(?:hydra_mlp\.)?(\d+)\.(\d+)\.linear\.(\w+)"), r"blocks.\1.layers.\2.\3"),
    (re.compile(r"hydra_mlp\.(\d+)\.0\.res_connection\.(\w+)"), r"blocks.\1.residual.\2"),
    (re.compile(r"hydra_lm_head\.(\d+)\.(\w+)"), r"lm_heads.\1.\2"),
    (re.compile(r"(\d+)\.\d+\.weight"), r"lm_heads.\1.weight"),
)
"""Names in Medusa's and in Hydra's own code, and those of a chain, which are vLLM's."""
_COMPUTED = {"hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0}
"""What Hydra's config may say; other heads read other states or attend to them."""
_OTHER_HEADS = "supported: Medusa's heads, and Hydra's grounded heads of kind mlp"


def medusa_config(
    kind: HeadKind,
    sizes: ModelSizes,
    num_heads: int,
    num_blocks: int,
    dtype: str,
    draft_vocab_size: int | None = None,
) -> dict[str, Any]:
    """The content of config.json for Medusa's or Hydra's heads.

    Args:
        sizes, dtype, draft_vocab_size: as `model_config`.
        num_heads: tokens of a path.
        num_blocks: residual blocks of a head.
    """
    return {
        "architectures": [f"{kind.title}Model"],
        "model_type": kind.name,
        NUM_HEADS: num_heads,
        NUM_BLOCKS: num_blocks,
        "medusa_fc_bias": True,
        **model_config(sizes, dtype, draft_vocab_size),
    }


def is_medusa(config: Content) -> bool:
    """Whether a config.json is of Medusa's or Hydra's heads, in anybody's spelling."""
    return MEDUSA.recognizes(config) or HYDRA.recognizes(config)


def in_medusa_format(
    source: Path, config: Content, tensors: Tensors, target: Path
) -> tuple[dict[str, Any], Tensors]:
    """Config and tensors of heads that others trained, as a chain has them.

    There are as many heads as are stored; published configs may name fewer. A block that is stored
    without a bias gets one of zeros.

    Args:
        source: the heads' folder.
        config: content of its config.json.
        tensors: all that is stored, by name.
        target: folder of the model that they draft for.

    Raises:
        UserError: heads of another variant or for another model, a missing or an unknown tensor,
            or one of another shape or dtype.
    """
    for key, value in _COMPUTED.items():
        if config.get(key, value) != value:
            raise UserError(
                "unsupported heads",
                f"{source / 'config.json'} {key} {config[key]!r}",
                _OTHER_HEADS,
            )
    stored = {_name(name): tensor for name, tensor in tensors.items()}
    blocks = [(int(found[1]), int(found[2])) for found in map(_BLOCK.fullmatch, stored) if found]
    for name in ("blocks.0.layers.0.weight", "lm_heads.0.weight"):
        if name not in stored or stored[name].dim() != 2:
            raise UserError(
                "missing tensor", f"no matrix {name} in {source}", "download the heads again"
            )
    model = read_config(target).decoder
    stored = _with_tables(stored, model.vocab_size, source)
    hidden_size, dtype = len(stored["blocks.0.layers.0.weight"]), stored["lm_heads.0.weight"].dtype
    num_drafted = len(stored[OFFSETS]) if OFFSETS in stored else None
    num_heads, num_blocks = (1 + max(numbers) for numbers in zip(*blocks, strict=True))
    for key, found, expected in (
        ("hidden_size", hidden_size, model.hidden_size),
        ("outputs", len(stored["lm_heads.0.weight"]), num_drafted or model.vocab_size),
    ):
        if found != expected:
            base = f", by {_BASE} {config[_BASE]}" if _BASE in config else ""
            raise UserError(
                "heads do not fit their target",
                f"{key} {found} in {source}, {expected} of {target}",
                f"name the model that they were trained for{base}",
            )
    for name, weight in [*stored.items()]:
        if name.startswith("blocks.") and name.endswith(".weight"):
            bias = f"{name.removesuffix('weight')}bias"
            stored.setdefault(bias, weight.new_zeros(weight.shape[:1]))
    kind = HYDRA if HYDRA.recognizes(config) else MEDUSA
    completed = medusa_config(kind, model, num_heads, num_blocks, name_of(dtype), num_drafted)
    read = head_config(completed, f"{source / 'config.json'}")
    check_tensors(source, stored, read, "heads")
    return completed, stored


def _name(stored: str) -> str:
    """The name in a chain of a tensor that is stored under this one."""
    name = _PREFIXES.sub("", stored, count=1)
    for spelling, ours in _SPELLINGS:
        if spelling.fullmatch(name):
            return spelling.sub(ours, name)
    return name


def _with_tables(stored: Tensors, vocab_size: int, source: Path) -> Tensors:
    """The tensors with the tables of a draft vocabulary in the place of vLLM's map, if there is
    one, and output projections of these tokens in ascending order."""
    if _TOKEN_MAP not in stored:
        return stored
    token_ids = stored[_TOKEN_MAP]
    known = {*range(vocab_size)}
    if token_ids.dim() != 1 or not 0 < len(known & {*token_ids.tolist()}) == len(token_ids):
        raise UserError(
            "malformed draft vocabulary",
            f"{_TOKEN_MAP} in {source} is no list of tokens below {vocab_size}, each once",
            "fetch the heads again",
        )
    ascending, order = token_ids.long().sort()
    found = dict(stored)
    del found[_TOKEN_MAP]
    for name, tensor in stored.items():
        if name.startswith("lm_heads."):
            rows = {vocab_size: ascending, len(order): order}.get(tensor.shape[:1].numel())
            found[name] = tensor if rows is None else tensor[rows]
    return found | draft_tables(ascending, vocab_size)
