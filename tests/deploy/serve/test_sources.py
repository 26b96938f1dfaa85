"""Encoder-decoders over HTTP."""

import pytest

from polybasic.chain.formats.bare import bare_chain
from polybasic.deploy import Chain, load_chain
from tests.checkpoints import write_t5
from tests.deploy.serve.serving import serving

TEXT = "the sea is as old as the rain"
ASKED = {"max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    folder = tmp_path_factory.mktemp("t5") / "target"
    write_t5(folder)
    return load_chain(bare_chain(folder, "t5"), sequences=2)


def test_texts_and_messages_are_sources(chain: Chain) -> None:
    expected = chain.generate(TEXT, max_new_tokens=12, temperature=0).text
    ids = chain.encode(TEXT)
    with serving(chain) as server:
        messages = [{"role": "user", "content": TEXT}]
        chat = server.chat(messages=messages, **ASKED)
        assert chat["choices"][0]["message"]["content"] == expected
        for prompt in (TEXT, ids):
            told = server.complete(prompt=prompt, **ASKED)
            assert told["choices"][0]["text"] == expected
            assert told["usage"]["prompt_tokens"] == len(ids)
        text = server.post("/tokenize", {"prompt": TEXT}).json()
        assert text["tokens"] == ids[:-1]
        # an answer that was begun goes on as it would
        begun = [*messages, {"role": "assistant", "content": "the"}]
        told = server.chat(
            messages=begun, add_generation_prompt=False, continue_final_message=True, **ASKED
        )
        asked = chain.encode(begun, continues=True)
        found = chain.generate(asked, max_new_tokens=12, temperature=0).text
        assert told["choices"][0]["message"]["content"] == found
        for prompt, message in (
            ("the <pad> sea", "text spells the token that ends a source"),
            (ids[:-1], "no source and start token"),
        ):
            refused = server.post("/v1/completions", {"prompt": prompt, **ASKED})
            assert refused.status_code == 400
            assert message in refused.json()["error"]["message"]
