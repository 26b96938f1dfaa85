"""Filling in the middle: `suffix` of completions, and llama.cpp's /infill."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polybasic.deploy import load_chain
from polybasic.deploy.serve.api.infill import Infilling
from tests.deploy.byte_target import write_byte_target
from tests.deploy.serve.serving import Served, serving
from tests.deploy.serve.test_refusals import COMPLETIONS, refusal

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>")
SAMPLED = {"temperature": 0.8, "seed": 4}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_target(folder, MARKS)
    with serving(load_chain(folder, dtype="float32", sequences=4)) as served:
        yield served


def ids_of(server: Served, text: str) -> list[int]:
    """With marks as what they are."""
    return list(server.service.tokenizer.encode(text, add_special_tokens=False).ids)


def answer_to(server: Served, text: str) -> Any:
    """A prompt that is spelled with marks, as a plain completion."""
    stops = ids_of(server, "<|fim_pad|><|file_sep|>")
    fields = {"prompt": ids_of(server, text), "max_tokens": 12, "stop_token_ids": stops, **SAMPLED}
    return server.complete(**fields)


def test_a_suffix_is_told_by_marks(server: Served) -> None:
    expected = answer_to(server, "<|fim_prefix|>a = <|fim_suffix|>\nb<|fim_middle|>")
    found = server.complete(prompt="a = ", suffix="\nb", max_tokens=12, **SAMPLED)
    assert found["choices"] == expected["choices"]


def test_infill_answers_as_llama_cpp(server: Served) -> None:
    asked = {"input_prefix": "x\n", "prompt": "a = ", "input_suffix": "\nb", "n_predict": 12}
    taken = {"samplers": ["top_k"], "cache_prompt": True, "t_max_predict_ms": 500, "stream": False}
    expected = answer_to(server, "<|fim_prefix|>x\na = <|fim_suffix|>\nb<|fim_middle|>")
    found = server.post("/infill", asked | taken | SAMPLED).json()
    assert found["content"] == expected["choices"][0]["text"]
    assert found["tokens_evaluated"] == expected["usage"]["prompt_tokens"]
    assert found["tokens_predicted"] == expected["usage"]["completion_tokens"]
    ends = {"length": "limit", "stop": "eos"}
    assert found["stop_type"] == ends[expected["choices"][0]["finish_reason"]]
    assert found["timings"]["predicted_n"] == found["tokens_predicted"]
    extra = [{"filename": "u.py", "text": "c = 1"}]
    text = "<|file_sep|>u.py\nc = 1\n<|fim_prefix|>x\na = <|fim_suffix|>\nb<|fim_middle|>"
    found = server.post("/infill", asked | SAMPLED | {"input_extra": extra}).json()
    assert found["content"] == answer_to(server, text)["choices"][0]["text"]
    most = server.post("/infill", {"input_prefix": "a", "n_predict": -1, "temperature": 0}).json()
    assert most["tokens_predicted"] > 12 or most["stop_type"] == "eos"


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        ("/infill", {"input_prefix": 1}, "input_prefix"),
        ("/infill", {"input_prefix": "a", "stream": True}, "stream"),
        ("/infill", {"input_prefix": "a", "repeat_penalty": 2.0}, "repeat_penalty"),
        ("/infill", {"input_prefix": "a", "temperature": -1}, "temperature"),
        ("/infill", {"input_prefix": "a" * 2000}, "input_prefix"),
        (COMPLETIONS, {"prompt": [1, 2], "suffix": "a"}, "suffix"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b", "echo": True}, "suffix"),
    ],
)
def test_what_cannot_be_filled_is_refused(
    server: Served, path: str, asked: dict[str, Any], param: str
) -> None:
    assert refusal(server, path, asked)["param"] == param


def test_a_long_suffix_is_refused_before_it_is_read(server: Served) -> None:
    asked = {"prompt": "a", "suffix": "b" * 20_000}
    assert "20,001 characters" in refusal(server, COMPLETIONS, asked)["message"]


def test_a_tokenizer_without_marks_refuses(byte_chain: Path) -> None:
    chain = load_chain(byte_chain, dtype="float32")
    assert Infilling.of(chain.tokenizer.backend_tokenizer) is None
    with serving(chain) as plain:
        error = refusal(plain, COMPLETIONS, {"prompt": "a", "suffix": "b"})
        assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
        error = refusal(plain, "/infill", {"input_prefix": "a"})
        assert (error["param"], error["code"]) == ("input_prefix", "unsupported_parameter")
