"""llama.cpp's library and programs, as xllamacpp brings them, over a small checkpoint."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch

from polybasic.chain.formats.gguf.writing import write_gguf
from polybasic.chain.model.reference import load_reference_model
from polybasic.deploy.bench.peers.process import FOLDER, run_worker
from polybasic.deploy.bench.peers.workers.llama_library import LlamaError
from polybasic.deploy.bench.peers.workers.llama_model import LlamaModel
from tests.deploy.serve.serving import write_byte_tokenizer

PYTHON = Path(os.environ["PEERS_PYTHON"]).absolute()
PROGRAM = FOLDER / "workers" / "llama_program.py"
IDS = [5, 9, 14, 9, 14, 9, 40, 3, 3, 22]
START_SECONDS = 60.0


@pytest.fixture(scope="module")
def target(_tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "target"
    shutil.copytree(_tiny_models / "target", folder)
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def files(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    found = {kind: folder / f"{kind}.gguf" for kind in ("F32", "Q4_0")}
    for kind, path in found.items():
        write_gguf(target, path, matrices=kind)
    return found


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of the peers' environment, as one that is named."""
    code = "import importlib.util as u; print(u.find_spec('xllamacpp').origin)"
    folder = Path(run_worker((PYTHON, "-c", code), 1).strip()).parent
    [path] = folder.glob("*.so")
    (tmp_path / "libllama.so").symlink_to(path)
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))


@pytest.mark.usefixtures("library")
def test_logits_are_the_targets(target: Path, files: dict[str, Path]) -> None:
    model = load_reference_model(target, torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    differences = {}
    for kind, path in files.items():
        loaded = LlamaModel(path, threads=1, context_tokens=32, is_exact=True)
        assert loaded.vocab_size == expected.shape[1]
        found = loaded.logits(IDS)
        np.testing.assert_array_equal(loaded.logits(IDS), found)
        differences[kind] = np.abs(found - expected).max()
        loaded.close()
    assert differences["F32"] < 1e-3
    assert differences["Q4_0"] > 1e-2  # other weights


@pytest.mark.usefixtures("library")
def test_a_sequence_is_read_in_parts_and_cut(files: dict[str, Path]) -> None:
    loaded = LlamaModel(files["F32"], threads=1, context_tokens=len(IDS))
    expected = loaded.logits(IDS)
    loaded.cut(4)
    loaded.read(IDS[4:7], rows=1)
    np.testing.assert_allclose(loaded.row(0), expected[6], atol=1e-4)
    loaded.read(IDS[7:], rows=2)
    np.testing.assert_allclose(loaded.row(0), expected[8], atol=1e-4)
    assert loaded.best(1) == expected[9].argmax()
    with pytest.raises(LlamaError, match="more than the 10 tokens of the context"):
        loaded.read([1], rows=1)
    loaded.cut(0)
    with pytest.raises(LlamaError, match=r"llama\.cpp cannot read: "):
        loaded.read([loaded.vocab_size], rows=1)
    loaded.close()


@pytest.mark.usefixtures("library")
def test_texts_become_tokens_and_texts_again(files: dict[str, Path]) -> None:
    loaded = LlamaModel(files["F32"], threads=1, context_tokens=8)
    pieces = {token: loaded.piece(token) for token in range(loaded.vocab_size)}
    letters = [token for token, piece in pieces.items() if len(piece) == 1 and piece.isascii()]
    assert len(letters) > 2
    text = b"".join(pieces[token] for token in letters).decode()
    assert loaded.tokenize(text, add_special=False, parse_special=False) == letters
    loaded.close()


@pytest.mark.usefixtures("library")
def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_text("no model")
    for name in ("x.gguf", "absent.gguf"):
        with pytest.raises(LlamaError, match=f"llama.cpp cannot load {name}: .*failed to load"):
            LlamaModel(tmp_path / name, threads=1, context_tokens=8)


def test_the_bench_times_passes_by_their_tokens(files: dict[str, Path]) -> None:
    words = (PYTHON, "-m", "workers.llama_program", "llama-bench", "--model", files["F32"])
    more = ("--n-prompt", "1,4", "--n-gen", 0, "--n-depth", 16, "--repetitions", 3)
    found = json.loads(run_worker((*words, *more, "--threads", 1, "--output", "json"), 1))
    assert [timing["n_prompt"] for timing in found] == [1, 4]
    assert all(len(timing["samples_ns"]) == 3 and min(timing["samples_ns"]) > 0 for timing in found)


@contextmanager
def server(*words: object) -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    command = (PYTHON, PROGRAM, "llama-server", *words, "--host", "127.0.0.1", "--port", port)
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.DEVNULL)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    try:
        while True:
            try:
                urlopen(f"{url}/health").close()
                break
            except URLError:
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.1)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


@pytest.mark.parametrize(
    "drafts",
    [
        "",
        "--spec-type draft-simple --spec-draft-n-max 4 --spec-draft-model {Q4_0}",
        "--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 6",
    ],
)
def test_the_server_answers_and_drafts_where_it_is_asked_to(
    files: dict[str, Path], drafts: str
) -> None:
    shared = ("--model", files["F32"], "--no-webui", "--cache-ram", 0, "--no-kv-unified")
    sizes = ("--threads", 1, "--threads-batch", 1, "--parallel", 2, "--ctx-size", 256)
    body = {"prompt": IDS, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    with server(*shared, *sizes, *drafts.format(**files).split()) as url:
        asked = Request(f"{url}/v1/completions", json.dumps(body).encode())
        with urlopen(asked) as reply:
            found = json.loads(reply.read())
    assert found["usage"]["completion_tokens"] == 48
    assert ("draft_n" in found["timings"]) == bool(drafts)


def test_a_server_says_its_version_and_a_program_that_is_none_is_named() -> None:
    said = run_worker((PYTHON, PROGRAM, "llama-server", "--version"), 1)
    assert said.startswith("version: xllamacpp 2026.")
    done = subprocess.run([PYTHON, PROGRAM, "llama-run"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "no such program: llama-run; there are llama-bench, llama-server\n"
