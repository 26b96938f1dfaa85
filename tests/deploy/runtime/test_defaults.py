"""The sampling that a checkpoint asks for."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.deploy.runtime.defaults import read_default_sampling, read_stop_tokens
from polybasic.deploy.runtime.rounds.sampling import Sampling


def write(folder: Path, content: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    return folder


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, Sampling()),
        ({"do_sample": True}, Sampling(1.0)),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, Sampling(0.6, top_p=0.9)),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, Sampling(0.0, 20)),
        ({"temperature": 0.6}, Sampling(0.0)),
        (
            {"do_sample": True, "top_k": 0, "min_p": 0.1, "repetition_penalty": 1.1},
            Sampling(1.0, 0, min_p=0.1, repetition_penalty=1.1),
        ),
        ({"do_sample": True, "temperature": None, "top_k": None}, Sampling(1.0)),
        ({"do_sample": None, "max_length": 4096, "transformers_version": "4.1"}, Sampling()),
    ],
    ids=str,
)
def test_only_what_stands_in_the_file_counts(
    content: dict[str, Any], expected: Sampling, tmp_path: Path
) -> None:
    assert read_default_sampling(write(tmp_path, content)) == expected


def test_no_file_is_greedy(tmp_path: Path) -> None:
    assert read_default_sampling(tmp_path) == Sampling()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"top_p": 1.5}, "sampling setting out of range: top_p=1.5 in {path}; use 1e-30 to 1"),
        ({"temperature": -1}, "sampling setting out of range: temperature=-1 in {path}; use 0 for"),
        ({"top_k": "50"}, "sampling setting out of range: top_k=50 in {path}; use 1 or more"),
        (
            {"repetition_penalty": 0},
            "sampling setting out of range: repetition_penalty=0 in {path}",
        ),
        (
            {"do_sample": "yes"},
            "malformed generation config: do_sample = 'yes' in {path}; use true",
        ),
        ([], "malformed generation config: {path} holds no JSON object"),
    ],
    ids=str,
)
def test_refusals_name_the_file(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refusal:
        read_default_sampling(write(tmp_path, content))
    path = tmp_path / "generation_config.json"
    assert str(refusal.value).startswith(message.format(path=path))


def test_what_is_not_applied_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    neutral = {"no_repeat_ngram_size": 0, "typical_p": 1.0, "suppress_tokens": None}
    with caplog.at_level(logging.WARNING):
        read_default_sampling(write(tmp_path, neutral))
        assert caplog.messages == []
        read_default_sampling(write(tmp_path, neutral | {"no_repeat_ngram_size": 3}))
    path = tmp_path / "generation_config.json"
    assert caplog.messages == [
        f"{path} sets no_repeat_ngram_size = 3, which polybasic does not apply"
    ]


def test_stop_tokens_are_of_the_generation_config_or_else_the_config(tmp_path: Path) -> None:
    assert read_stop_tokens(read_config(write(tmp_path, {"eos_token_id": [5, 6]})), 7) == {5, 6, 7}
    assert read_stop_tokens(read_config(write(tmp_path, {})), 7) == {7, 9}
    assert read_stop_tokens(read_config(write(tmp_path, {"eos_token_id": 0})), None) == {0}
