"""A tokenizer of any kind becomes one that the chain can carry, with the same ids."""

import importlib.util
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from transformers import AutoTokenizer

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.tokenizer import needs_preparation, prepare_tokenizer
from tests.checkpoints import CHATML, FAMILIES, INSTRUCTION

TEXT = (
    "the a model says hello world quick brown fox jumps over lazy dog and then again for one more "
    "time while trains of thought run on through seven long winters"
)
PLAIN_TEXTS = [
    "The quick brown fox",
    "double  and   triple spaces ",
    "Größe — 你好 🙂 12345",
    "two\n\nlines\tand a tab",
]
CHAT_TEXTS = [
    "<s>[INST] hello world [/INST] the model says </s><s>[INST] again [/INST]",
    "</s>then the fox</s> then",
    "[INST] Größe [/INST]",
    " the space before it",
]


def added_token(content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"__type": "AddedToken", "content": content, **flags}


@pytest.fixture(scope="module")
def model_bytes() -> bytes:
    """A SentencePiece model with the settings that Llama 2's was trained with, on other words."""
    generator = random.Random(0)
    sentences = [
        " ".join(generator.choices(TEXT.split(), k=generator.randint(4, 12))).capitalize() + "."
        for _ in range(400)
    ]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.99995,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        unk_surface=" ⁇ ",
        minloglevel=2,
    )
    return model.getvalue()


@pytest.fixture
def checkpoint(tmp_path: Path, model_bytes: bytes) -> Path:
    """The tokenizer's files of Llama 2 and Vicuna: no tokenizer.json, no chat template."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(model_bytes)
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": added_token("<s>"),
        "clean_up_tokenization_spaces": False,
        "eos_token": added_token("</s>"),
        "legacy": False,
        "model_max_length": 4096,
        "pad_token": None,
        "padding_side": "right",
        "sp_model_kwargs": {},
        "tokenizer_class": "LlamaTokenizer",
        "unk_token": added_token("<unk>"),
    }
    write(folder / "tokenizer_config.json", config)
    named = {name: config[name]["content"] for name in ("bos_token", "eos_token", "unk_token")}
    write(folder / "special_tokens_map.json", named | {"pad_token": "<unk>"})
    write(folder / "config.json", {"model_type": "llama", "vocab_size": 420})
    return folder


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def edit(path: Path, **changes: Any) -> None:
    write(path, json.loads(path.read_text()) | changes)


def ids_of(folder: Path, texts: list[str]) -> list[list[int]]:
    return AutoTokenizer.from_pretrained(folder)(texts)["input_ids"]


@pytest.mark.parametrize("legacy", [False, True, None])
def test_a_sentencepiece_model_becomes_a_tokenizer_with_the_same_ids(
    checkpoint: Path, tmp_path: Path, legacy: bool | None
) -> None:
    edit(checkpoint / "tokenizer_config.json", legacy=legacy)
    assert needs_preparation(checkpoint, None)
    prepare_tokenizer(checkpoint, INSTRUCTION, tmp_path / "out")
    texts = PLAIN_TEXTS + CHAT_TEXTS
    assert ids_of(tmp_path / "out", texts) == ids_of(checkpoint, texts)
    names = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == INSTRUCTION
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.model_max_length == 4096


def test_plain_text_gets_the_ids_of_sentencepiece_itself(checkpoint: Path, tmp_path: Path) -> None:
    prepare_tokenizer(checkpoint, None, tmp_path / "out")
    model = sentencepiece.SentencePieceProcessor(model_file=str(checkpoint / "tokenizer.model"))
    expected = [[model.bos_id(), *model.encode(text)] for text in PLAIN_TEXTS]
    assert ids_of(tmp_path / "out", PLAIN_TEXTS) == expected
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


def test_legacy_spacing_is_kept(checkpoint: Path, tmp_path: Path) -> None:
    """The negative control of `legacy` above: saved by transformers alone, it is lost."""
    edit(checkpoint / "tokenizer_config.json", legacy=True)
    expected = ids_of(checkpoint, CHAT_TEXTS)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "saved")
    assert ids_of(tmp_path / "saved", CHAT_TEXTS) != expected
    prepare_tokenizer(checkpoint, None, tmp_path / "out")
    assert ids_of(tmp_path / "out", CHAT_TEXTS) == expected


@pytest.mark.parametrize("family", ["llama2", "qwen25", "gemma3"])
def test_a_template_replaces_the_tokenizers_own(family: str, tmp_path: Path) -> None:
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    FAMILIES[family].tokenizer().save_pretrained(checkpoint)
    own = (checkpoint / "chat_template.jinja").read_text()
    assert not needs_preparation(checkpoint, None)
    assert needs_preparation(checkpoint, CHATML)
    prepare_tokenizer(checkpoint, CHATML, out)
    assert (out / "chat_template.jinja").read_text() == CHATML
    assert ids_of(out, PLAIN_TEXTS) == ids_of(checkpoint, PLAIN_TEXTS)
    prepare_tokenizer(checkpoint, None, out)
    assert (out / "chat_template.jinja").read_text() == own


def test_tokenizers_that_cannot_be_read(checkpoint: Path, tmp_path: Path) -> None:
    model, out = checkpoint / "tokenizer.model", tmp_path / "out"
    model.write_bytes(b"no model at all")
    with pytest.raises(UserError, match=rf"malformed tokenizer: {model} is no SentencePiece model"):
        prepare_tokenizer(checkpoint, None, out)
    model.unlink()
    assert needs_preparation(checkpoint, None)
    with pytest.raises(UserError, match=r"no tokenizer: .* holds neither tokenizer.json nor token"):
        prepare_tokenizer(checkpoint, None, out)
    (checkpoint / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=rf"cannot load the tokenizer: {checkpoint} \(.+\); name"):
        prepare_tokenizer(checkpoint, None, out)
    assert not out.exists()


def test_sentencepiece_is_asked_for(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "sentencepiece" else find(name)
    )
    with pytest.raises(UserError, match=r"sentencepiece is not installed: .*tokenizer.model can"):
        prepare_tokenizer(checkpoint, None, tmp_path / "out")


def test_remote_code_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    prepare_tokenizer(checkpoint, None, tmp_path / "control")
    auto_map = {"AutoTokenizer": ["tokenization.Mine", None]}
    edit(checkpoint / "tokenizer_config.json", auto_map=auto_map)
    with pytest.raises(UserError, match=r"remote code refused: auto_map in .*tokenizer_config"):
        prepare_tokenizer(checkpoint, None, tmp_path / "out")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("one\n{% for m in messages %}", r"chat template is not valid Jinja: line 2 \("),
        ("{{ messages[0].content.nothing.at_all }}", "chat template does not render: one user tur"),
        ("{{ raise_exception('never') }}", r"chat template does not render: one user turn \(never"),
    ],
)
def test_templates_that_fail(checkpoint: Path, tmp_path: Path, template: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare_tokenizer(checkpoint, template, tmp_path / "out")
    assert not (tmp_path / "out").exists()
