"""Text files of a chain and of a run that hold what no reader should trust."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats import files
from polybasic.chain.formats.checkpoints.shapes import tensor_headers
from polybasic.chain.formats.files import MAX_NESTING, check_content, parse_json, read_json
from polybasic.deploy.planner.prompts import read_questions
from polybasic.recipes.schema.loading import load_recipe
from polybasic.train.data.conversation_files import read_file
from tests.attacks import outcomes

DEEP = "[" * 100_000 + "]" * 100_000
NO_JSON = {
    "deep": DEEP,
    "deeper than the limit": "[" * (MAX_NESTING + 2) + "]" * (MAX_NESTING + 2),
    "digits": '{"a": 1' + "0" * 5000 + "}",
    "half a pair": '{"a": "\\ud800"}',
    "half a pair as a key": '{"\\udfff": 1}',
    "NUL": "{\0}",
    "no UTF-8": b"\xff\xfe\x00",
    "cut": '{"a": [1,',
    "empty": "",
}
NO_OBJECTS = {"list": "[]", "text": '"x"', "number": "1", "null": "null"}
NO_YAML = {
    "deep": f"name: x\ndescription: {DEEP}",
    "digits": "name: x\nseed: 1" + "0" * 5000,
    "half a pair": 'name: "\\ud800"',
    "NUL": "name: x\0",
    "no UTF-8": b"name: \xff",
    "alias": "name: &a x\ndescription: *a",
    "itself": "name: x\ntrain: &a {a: *a}",
    "python": "name: !!python/object/apply:os.system [true]",
    "cut": "name: [x",
    "other names": "name: " + "x" * 301,
    "infinite": "name: x\ntrain: {learning_rate: .inf}",
    "true": "name: x\ntrain: {num_steps: true}",
}


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def accept(chain: Path) -> None:
    """Make the manifest's digests those of the files, as somebody does who wants to be trusted."""
    path = chain / "chain.json"
    manifest = json.loads(path.read_text())
    manifest.pop("sha256", None)
    named = [(member["reference"]["path"], member["files"]) for member in manifest["members"]]
    for folder, digests in [
        *named,
        (manifest["tokenizer"]["path"], manifest["tokenizer"]["files"]),
    ]:
        for name in digests:
            digests[name] = hashlib.sha256((chain / folder / name).read_bytes()).hexdigest()
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("content", NO_JSON.values(), ids=NO_JSON)
def test_the_reader_of_json_refuses_in_one_line(tmp_path: Path, content: str | bytes) -> None:
    path = write(tmp_path / "a.json", content)
    line = outcomes.of_call(lambda: read_json(path, "manifest"))
    assert line is not None
    assert line.startswith("manifest is not ")
    assert str(path) in line


def test_json_up_to_the_limits_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (
        "[" * MAX_NESTING + "]" * MAX_NESTING,
        '"\\ud83d\\ude00 \\u0000"',
        "1" + "0" * 4000,
    ):
        assert parse_json(text, "record", "here") == json.loads(text)
    check_content({"a": [{"b": None}]}, "record", "here")
    monkeypatch.setattr(files, "MAX_TEXT_BYTES", 10)
    path = write(tmp_path / "a.json", '"12345678"')
    assert read_json(path, "record") == "12345678"
    with pytest.raises(
        UserError, match=r"record is too large: .* \(11 bytes\); up to 10 bytes are"
    ):
        read_json(write(path, '"123456789"'), "record")


@pytest.mark.parametrize("content", (NO_JSON | NO_OBJECTS).values(), ids=NO_JSON | NO_OBJECTS)
@pytest.mark.parametrize(
    "name", ["chain.json", "target/config.json", "draft/config.json", "tokenizer/tokenizer.json"]
)
def test_files_of_a_chain_are_refused(tiny_chain: Path, name: str, content: str | bytes) -> None:
    write(tiny_chain / name, content)
    if name != "chain.json":
        accept(tiny_chain)
    assert outcomes.of_command("generate", tiny_chain, "-p", "w1", "--max-new-tokens", 2)


@pytest.mark.parametrize("content", NO_YAML.values(), ids=NO_YAML)
def test_recipes_are_refused(tmp_path: Path, content: str | bytes) -> None:
    path = write(tmp_path / "attack.yaml", content)
    assert outcomes.of_call(lambda: load_recipe(str(path)))
    assert outcomes.of_command("recipes", "validate", path)
    assert outcomes.of_command("run", path, "--dry-run")


@pytest.mark.parametrize("content", NO_JSON.values(), ids=NO_JSON)
def test_rows_of_prompts_and_conversations_are_refused(
    tmp_path: Path, content: str | bytes
) -> None:
    path = write(tmp_path / "rows.jsonl", content)
    assert outcomes.of_call(lambda: list(read_questions(path)))
    assert outcomes.of_call(lambda: list(read_file(path)))
    if isinstance(content, str):
        path = write(tmp_path / "rows.json", f"[{content}]")
        if content:
            assert outcomes.of_call(lambda: list(read_file(path)))


@pytest.mark.parametrize("header", [*NO_JSON.values(), *NO_OBJECTS.values()], ids=str)
def test_headers_of_tensors_are_refused(tmp_path: Path, header: str | bytes) -> None:
    content = header if isinstance(header, bytes) else header.encode()
    write(tmp_path / "model.safetensors", len(content).to_bytes(8, "little") + content)
    assert outcomes.of_call(lambda: tensor_headers(tmp_path))


def test_a_copy_whose_digests_were_made_to_fit_is_read(tiny_chain: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_chain, tmp_path / "copy"))
    accept(copy)
    assert outcomes.of_command("verify", copy) is None
