"""How a checkpoint itself wants to be sampled, by its generation_config.json."""

import logging
from pathlib import Path
from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.config import ConfigFile
from polybasic.chain.formats.files import read_json
from polybasic.deploy.runtime.rounds.warping import Sampling

_NAME = "generation_config.json"
_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (0,),
    "typical_p": (1, 1.0),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "sequence_bias": (),
    "exponential_decay_length_penalty": (),
    "stop_strings": (),
}
"""What would change an answer under transformers, with the values (beside null) that would not."""

_log = logging.getLogger(__name__)


def read_default_sampling(target: Path) -> Sampling:
    """The sampling of a checkpoint's generation_config.json, greedy where there is none.

    Only values that stand in the file count. `do_sample` decides as in transformers: false or
    absent is temperature 0, true without a temperature is temperature 1. What this runtime does
    not apply is reported in the log.

    Raises:
        UserError: a value out of range, or a file that is malformed.
    """
    path = target / _NAME
    content = read_generation_config(target)
    given = {name: content[name] for name in _SETTINGS if content.get(name) is not None}
    does_sample = content.get("do_sample")
    if does_sample not in (None, True, False):
        raise UserError(
            "malformed generation config",
            f"do_sample = {does_sample!r} in {path}",
            "use true or false",
        )
    try:
        Sampling(**given)
        given["temperature"] = given.get("temperature", 1.0) if does_sample else 0.0
        sampling = Sampling(**given)
    except UserError as error:
        raise UserError(error.what, f"{error.where} in {path}", error.do) from error
    for name, neutral in _NOT_APPLIED.items():
        value = content.get(name)
        if value is not None and value not in neutral:
            _log.warning("%s sets %s = %r, which polybasic does not apply", path, name, value)
    return sampling


def read_stop_tokens(config: ConfigFile, eos_token_id: int | None) -> frozenset[int]:
    """End-of-sequence ids: of generation_config.json, or config.json, and the tokenizer's.

    Raises:
        UserError: an id that is none.
    """
    found = [] if eos_token_id is None else [eos_token_id]
    ids = read_generation_config(config.folder).get("eos_token_id")
    if ids is None:
        ids = config.content.get("eos_token_id")
    if ids is not None:
        ids = ids if isinstance(ids, list) else [ids]
        if any(type(token_id) is not int or token_id < 0 for token_id in ids):
            raise UserError(
                "malformed generation config",
                f"eos_token_id = {ids!r} in {config.folder}",
                "name tokens by id",
            )
        found += ids
    return frozenset(found)


def read_generation_config(target: Path) -> dict[str, Any]:
    """The content of a checkpoint's generation_config.json, empty where there is none.

    Raises:
        UserError: it is no JSON object.
    """
    path = target / _NAME
    content = read_json(path, "generation config") if path.is_file() else {}
    if not isinstance(content, dict):
        raise UserError(
            "malformed generation config", f"{path} holds no JSON object", "export it again"
        )
    return content
