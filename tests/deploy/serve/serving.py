"""A chain behind a live server, in a thread of the test."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2
from fastapi import FastAPI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from polybasic.deploy import load_chain
from polybasic.deploy.runtime.chain import Chain
from polybasic.deploy.runtime.listening import bound
from polybasic.deploy.serve.app import create_app
from polybasic.deploy.serve.learning import Learner
from polybasic.deploy.serve.server import Server
from polybasic.deploy.serve.service import Service
from polybasic.deploy.serve.settings import ServeSettings
from polybasic.deploy.serve.texts import TokenTexts
from tests.conftest import VOCAB_SIZE
from tests.deploy.byte_target import write_byte_target

_HIGH_BYTES = sorted({*"ä€😀".encode()})
QUESTION = [{"role": "user", "content": "what is it"}]
TEMPLATE = """{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Of chats, with tools as Hermes has them."""


def write_byte_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of as many tokens as the tiny models have."""
    shown = {byte: character for character, byte in TokenTexts.byte_alphabet().items()}
    plain = [*b"abcdefghijklmnopqrstuvwxyz .,!?\n", *_HIGH_BYTES]
    tokens = [shown[byte] for byte in plain]
    tokens += [f"{first}{second}" for first in "aeiou" for second in "nrst"]
    tokens = tokens[: VOCAB_SIZE - 1]
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>")])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        chat_template="{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
    ).save_pretrained(folder)


@dataclass(frozen=True)
class Served:
    """A server that answers."""

    url: str
    app: FastAPI
    server: Server
    client: httpx2.Client

    @property
    def service(self) -> Service:
        service: Service = self.app.state.service
        return service

    def metric(self, name: str, **labels: str) -> float:
        """A number of /metrics; 0 for one that was not counted yet."""
        registry = self.service.metrics.registry
        found = registry.get_sample_value(f"polybasic:{name}", {"model_name": "tiny", **labels})
        return found or 0.0

    def post(self, path: str, content: Any, **options: Any) -> httpx2.Response:
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        return self.client.post(path, content=json.dumps(content), headers=headers, **options)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        return self.client.get(path, **options)

    def chat(self, **fields: Any) -> dict[str, Any]:
        """The whole answer to a question, which is not refused."""
        answer = self.post("/v1/chat/completions", {"messages": QUESTION, **fields})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def complete(self, **fields: Any) -> dict[str, Any]:
        """The same of a text."""
        answer = self.post("/v1/completions", {"prompt": "what is it", **fields})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def chunks(self, path: str = "/v1/chat/completions", **fields: Any) -> list[dict[str, Any]]:
        """A stream's, which ends as it should."""
        asked = {"messages": QUESTION} if "chat" in path else {"prompt": "what is it"}
        answer = self.post(path, {**asked, "stream": True, **fields})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, ended, rest = answer.text.split("\n\n")
        assert (ended, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


@contextmanager
def serving(chain: Chain, learner: Learner | None = None, **settings: Any) -> Iterator[Served]:
    """A server over a chain, at a free port, as long as the block runs."""
    given = {"model_names": ("tiny",), "sequences": 4, **settings}
    app = create_app(chain, ServeSettings(**given), learner)
    listening = bound("127.0.0.1", 0, "--port 0", "--port 0")
    server = Server(app, shutdown_seconds=5)
    thread = Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with httpx2.Client(base_url=url, timeout=30, verify=False, trust_env=False) as client:
            yield Served(url, app, server, client)
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive()


@contextmanager
def serving_tools(folder: Path) -> Iterator[Served]:
    """The same over a target of bytes, made in a folder, whose chat template has tools."""
    write_byte_target(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serving(load_chain(folder, dtype="float32", sequences=4)) as served:
        yield served


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """What a stream said in one of its answers."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for choice in choices
        if choice["index"] == index
    )
