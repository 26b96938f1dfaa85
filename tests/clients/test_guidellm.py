"""guidellm measures a live server with a local tokenizer and prompts of its own making."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from polybasic.deploy import Chain
from tests.deploy.serve.serving import Served

PROMPT_TOKENS, NEW_TOKENS, REQUESTS, STREAMS = 24, 16, 24, 4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_all_requests_succeed(path: str, chain: Chain, server: Served, tmp_path: Path) -> None:
    before = server.metric("generation_tokens_total")
    options = {
        "--backend": f"kind=openai_http,target={server.url},model=tiny,request_format={path}",
        "--profile": f"kind=concurrent,streams={STREAMS}",
        "--constraint": f"kind=max_requests,count={REQUESTS}",
        "--tokenizer": f"kind=huggingface_auto,model={chain.folder / 'tokenizer'}",
        "--data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={NEW_TOKENS}",
        "--output": f"kind=json,path={tmp_path / 'found.json'}",
    }
    words = [word for option in options.items() for word in option]
    command = [sys.executable, "-m", "guidellm", "run", *words, "--disable-console"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [benchmark] = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert requests["errored"] == []
    assert len(requests["successful"]) == REQUESTS
    for request in requests["successful"]:
        assert request["output_tokens"] == NEW_TOKENS
    counted = server.metric("generation_tokens_total") - before
    assert counted >= REQUESTS * NEW_TOKENS
