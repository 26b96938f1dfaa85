"""P-EAGLE heads of others in the layout of a chain.

Sources: speculators 0.9.0 (speculators/models/peagle), SpecForge 0.2.0
(specforge/modeling/draft/peagle.py), vLLM (vllm/transformers_utils/configs/speculators).
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.config import head_config, read_config
from polybasic.chain.formats.checkpoints.draft_vocabulary import draft_token_ids
from polybasic.chain.formats.head_kinds.block import NUM_POSITIONS
from polybasic.chain.formats.head_kinds.eagle3 import EAGLE_SECTION, LAYER_IDS
from polybasic.chain.formats.head_kinds.kind import Content
from polybasic.chain.formats.head_kinds.peagle import MASK_TOKEN, PEAGLE, PEAGLE_ARCHITECTURE
from polybasic.chain.heads.checks import (
    EMBEDDING,
    check_sizes,
    check_tensors,
    without_whole_vocabulary,
)
from polybasic.chain.heads.foreign import eagle3_feature_layers, eagle3_variants
from polybasic.chain.kernels.product_times import name_of

_MASK_TOKENS = (MASK_TOKEN, "pard_token", "ptd_token_id")
"""What a config.json calls the mask token."""
_POSITIONS = 8
"""That both trainers train where nothing else is said."""
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
)
_KEPT = ("head_dim", "hidden_act", "layer_types", "sliding_window", "rope_scaling")


def in_peagle_format(
    source: Path, config: Content, tensors: dict[str, Tensor], target: Path
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a head that others trained, as a chain has them.

    Args:
        source: the head's folder.
        config: as `polybasic.chain.heads.foreign.read_foreign_config` returns it.
        tensors: all that is stored, by name.
        target: folder of the model that it drafts for.

    Raises:
        UserError: a head of another variant or for another model, a key that its config lacks, a
            missing or an unknown tensor, or one of another shape or dtype.
    """
    where, model = f"{source / 'config.json'}", read_config(target).decoder
    given = {key: value for key, value in config.items() if value is not None}
    rope = "rope_parameters" if "rope_parameters" in given else "rope_theta"
    mask = next((given[key] for key in _MASK_TOKENS if key in given), None)
    needed = {key: given.get(key) for key in (*_SIZES, rope)} | {MASK_TOKEN: mask}
    if missing := [key for key, value in needed.items() if value is None]:
        raise UserError("head config lacks a key", f"{where} {missing[0]}", "complete the config")
    stored = without_whole_vocabulary(tensors, model.vocab_size)
    token_ids = draft_token_ids(stored, f"{source}")
    layers = eagle3_feature_layers(where, dict(config), model.num_layers)
    variants = eagle3_variants(where, dict(config))
    completed = {
        **{key: given[key] for key in _KEPT if key in given},
        **needed,
        "architectures": [PEAGLE_ARCHITECTURE],
        "model_type": "qwen3" if any("q_norm" in name for name in stored) else "llama",
        # heads declare the length that they were trained at; rotary positions work beyond it
        "max_position_embeddings": model.context_tokens,
        "tie_word_embeddings": False,
        EAGLE_SECTION: {"use_aux_hidden_state": True, LAYER_IDS: list(layers)},
        **{key: True for key, has in variants.items() if has},
        NUM_POSITIONS: _num_positions(given),
    }
    if token_ids is not None:
        completed["draft_vocab_size"] = len(token_ids)
    head = head_config(completed, where)
    check_sizes(where, head, model, target)
    if EMBEDDING not in stored:
        raise UserError("missing tensor", f"{EMBEDDING} in {source}", "download the head again")
    check_tensors(source, stored, head)
    return completed | {"torch_dtype": name_of(stored["fc.weight"].dtype)}, stored


def is_peagle(config: Content) -> bool:
    """Whether a config.json is of such a head; see `read_foreign_config`."""
    return PEAGLE.recognizes(config)


def _num_positions(given: Content) -> int:
    """The tokens of a path: those that it proposes by its config, or as many as are usual."""
    if NUM_POSITIONS in given:
        return int(given[NUM_POSITIONS])
    section = given.get("speculators_config")
    methods = section.get("proposal_methods") if isinstance(section, dict) else None
    for method in methods if isinstance(methods, list) else []:
        if isinstance(method, dict) and isinstance(method.get("speculative_tokens"), int):
            return int(method["speculative_tokens"])
    return _POSITIONS
