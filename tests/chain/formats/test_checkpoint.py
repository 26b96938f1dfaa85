"""Checkpoints are found or refused in one line, and their weights are read without running code."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import load_file, save_file

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.chains import resolve_chain
from polybasic.chain.formats.checkpoints.checkpoint import (
    copy_checkpoint,
    load_tensors,
    split_hub_id,
    weight_files,
)
from polybasic.chain.formats.checkpoints.models import resolve_model
from polybasic.chain.model.reference import load_reference_model


def test_modules_of_files_import_no_torch() -> None:
    of_checkpoints = ("checkpoints.checkpoint", "checkpoints.hub")
    modules = ("card", "describe", "lineage", "manifest", "package", "verify", *of_checkpoints)
    imports = "; ".join(f"import polybasic.chain.formats.{module}" for module in modules)
    code = f"{imports}; import sys; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_folder_is_taken_as_it_is(tiny_target: Path, tmp_path: Path) -> None:
    assert resolve_model(str(tiny_target)) == tiny_target
    (tiny_target / "config.json").unlink()
    with pytest.raises(UserError, match=r"not a checkpoint: .* \(no config.json in it\)"):
        resolve_model(str(tiny_target))
    with pytest.raises(UserError, match=r"not a checkpoint: .*model.safetensors \(no folder\)"):
        resolve_model(str(tiny_target / "model.safetensors"))
    with pytest.raises(UserError, match=r"checkpoint not found: .* is neither a folder nor a hub"):
        resolve_model(str(tmp_path / "absent"))


def test_hub_ids() -> None:
    assert split_hub_id("org/name") == ("org/name", None)
    assert split_hub_id("org/name@v1") == ("org/name", "v1")
    assert split_hub_id("org/name@v1", "v1") == ("org/name", "v1")
    assert split_hub_id("org/name", "v1") == ("org/name", "v1")
    with pytest.raises(UserError, match=r"two revisions: org/name@v1 with revision v2"):
        split_hub_id("org/name@v1", "v2")
    for wrong in ("name", "a/b/c", "../name", "./name", "org/", ""):
        with pytest.raises(UserError, match=r"neither a folder nor a hub id"):
            split_hub_id(wrong)


def test_offline_without_the_checkpoint() -> None:
    with pytest.raises(UserError, match=r"hub not reached: polybasic-test/nothing@v1 is no folder"):
        resolve_model("polybasic-test/nothing@v1")


def _hub_error(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    request = httpx2.Request("GET", "https://huggingface.co/org/name")
    return kind("said the hub", response=httpx2.Response(401, request=request))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (_hub_error(errors.GatedRepoError), "gated repository: org/name; accept its terms at"),
        (
            _hub_error(errors.RepositoryNotFoundError),
            "repository not found: org/name is neither a folder here nor",
        ),
        (_hub_error(errors.RevisionNotFoundError), "revision not found: org/name; see"),
        (_hub_error(errors.HfHubHTTPError), "download failed: org/name (said the hub"),
        (httpx2.ReadTimeout("too slow"), "download failed: org/name (too slow)"),
        (OSError(28, "No space left on device"), "disk full: "),
    ],
)
def test_hub_refusals(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    def refuse(*arguments: Any, **settings: Any) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(UserError) as refusal:
        resolve_model("org/name")
    assert message in str(refusal.value)


def test_pickles_are_downloaded_only_without_safetensors(
    monkeypatch: pytest.MonkeyPatch, tiny_target: Path, tiny_chain: Path
) -> None:
    asked: list[Any] = []

    def download(repository: str, **settings: Any) -> str:
        asked.append((repository, settings["revision"], settings["allow_patterns"]))
        return str(tiny_chain if repository == "org/chain" else tiny_target)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("org/name", "v1") == tiny_target
    assert [(repository, revision) for repository, revision, _ in asked] == [("org/name", "v1")]
    assert not any("bin" in pattern for pattern in asked[0][2])
    (tiny_target / "model.safetensors").unlink()
    asked.clear()
    resolve_model("org/name")
    assert len(asked) == 2
    assert "pytorch_model*.bin" in asked[1][2]
    assert resolve_chain("org/chain") == tiny_chain
    (tiny_target / "config.json").unlink()
    with pytest.raises(UserError, match=r"not a checkpoint: .* \(no config.json in it\)"):
        resolve_chain("org/name")


def test_weights_of_one_file(tiny_target: Path) -> None:
    shutil.copy(tiny_target / "model.safetensors", tiny_target / "pytorch_model.bin")
    assert weight_files(tiny_target) == [tiny_target / "model.safetensors"]
    tensors, expected = load_tensors(tiny_target), load_file(tiny_target / "model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def _shard(folder: Path, suffix: str) -> dict[str, torch.Tensor]:
    """Split model.safetensors in two files with an index."""
    single = folder / "model.safetensors"
    tensors = load_file(single)
    single.unlink()
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    weight_map: dict[str, str] = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), 1):
        file_name = f"{stem}-0000{number}-of-00002.{suffix}"
        weight_map |= dict.fromkeys(names, file_name)
        part = {name: tensors[name] for name in names}
        if suffix == "safetensors":
            save_file(part, folder / file_name)
        else:
            torch.save(part, folder / file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return tensors


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_weights_of_two_files(tiny_target: Path, tmp_path: Path, suffix: str) -> None:
    expected = _shard(tiny_target, suffix)
    files = weight_files(tiny_target)
    assert [path.name.split("-")[1] for path in files] == ["00001", "00002"]
    tensors = load_tensors(tiny_target)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    copy_checkpoint(tiny_target, tmp_path / "copy")
    assert load_tensors(tmp_path / "copy").keys() == expected.keys()
    files[1].unlink()
    with pytest.raises(UserError, match=r"missing shard: .*-00002-of-00002"):
        weight_files(tiny_target)


def test_malformed_indexes(tiny_target: Path) -> None:
    _shard(tiny_target, "safetensors")
    index = tiny_target / "model.safetensors.index.json"
    for shard in ("../model.safetensors", "/model.safetensors", "model.bin"):
        index.write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
        with pytest.raises(
            UserError, match=r"malformed weight index: '.*' in .* is no .safetensors"
        ):
            weight_files(tiny_target)
    index.write_text("{}")
    with pytest.raises(UserError, match=r"malformed weight index: no weight_map"):
        weight_files(tiny_target)
    index.unlink()
    with pytest.raises(UserError, match=r"no weights: .* holds neither model.safetensors nor"):
        weight_files(tiny_target)


def test_a_tensor_in_two_files_is_refused(tiny_target: Path) -> None:
    tensors = _shard(tiny_target, "safetensors")
    save_file(tensors, tiny_target / "model-00002-of-00002.safetensors")
    with pytest.raises(UserError, match=r"tensor in two files: .* in .*-00002-of-00002"):
        load_tensors(tiny_target)


def test_pickles_of_tensors_are_read_mapped_or_old(tiny_target: Path) -> None:
    tensors = load_file(tiny_target / "model.safetensors")
    (tiny_target / "model.safetensors").unlink()
    for is_zip in (True, False):
        path = tiny_target / "pytorch_model.bin"
        torch.save(tensors, path, _use_new_zipfile_serialization=is_zip)
        read = load_tensors(tiny_target)
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in read.items())


class _RunsCode:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_pickles_of_anything_else_are_refused(tiny_target: Path, tmp_path: Path) -> None:
    (tiny_target / "model.safetensors").unlink()
    path, trace = tiny_target / "pytorch_model.bin", tmp_path / "was_run"
    torch.save({"weight": _RunsCode(trace)}, path)
    with pytest.raises(UserError, match=r"pickle refused: .*pytorch_model.bin holds something"):
        load_tensors(tiny_target)
    path.write_bytes(pickle.dumps({"weight": _RunsCode(trace)}))
    with pytest.raises(UserError, match=r"pickle refused"):
        load_tensors(tiny_target)
    torch.save({"weight": "text"}, path)
    with pytest.raises(UserError, match=r"pickle refused"):
        load_tensors(tiny_target)
    assert not trace.exists()
    torch.save({"weight": torch.ones(2)}, path)
    assert load_tensors(tiny_target)["weight"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_damaged_weights_are_refused(tiny_target: Path, name: str) -> None:
    content = load_file(tiny_target / "model.safetensors")
    (tiny_target / "model.safetensors").unlink()
    path = tiny_target / name
    save_file(content, path) if name.endswith("safetensors") else torch.save(content, path)
    load_tensors(tiny_target)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=f"damaged weight file: .*{name}|pickle refused"):
        load_tensors(tiny_target)


def test_a_copy_holds_what_belongs_and_is_readable(tiny_target: Path, tmp_path: Path) -> None:
    (tiny_target / "training_args.bin").write_bytes(b"x")
    (tiny_target / "modeling_own.py").write_text("")
    (tiny_target / "metrics.jsonl").write_text("")
    (tiny_target / "LICENSE.txt").write_text("terms")
    (tiny_target / "checkpoint-5").mkdir()
    (tiny_target / "model.safetensors").chmod(0o600)
    copy_checkpoint(tiny_target, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [
        "LICENSE.txt",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "copy" / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_reference_model_has_the_weights_in_the_dtype_and_runs_no_code(
    tiny_target: Path, tmp_path: Path
) -> None:
    stored, trace = load_file(tiny_target / "model.safetensors"), tmp_path / "was_run"
    (tiny_target / "modeling_own.py").write_text(f"import os; os.mkdir({str(trace)!r})")
    config = json.loads((tiny_target / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own"}
    (tiny_target / "config.json").write_text(json.dumps(config))
    for dtype, expected in ((torch.float32, torch.float32), ("auto", torch.bfloat16)):
        model = load_reference_model(tiny_target, dtype, torch.device("cpu"))
        assert not model.training
        for name, parameter in model.named_parameters():
            assert parameter.dtype == expected
            assert parameter.equal(stored[name].to(expected))
    assert not trace.exists()


def test_a_reference_model_needs_all_of_its_weights(tiny_target: Path) -> None:
    path = tiny_target / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"^weight missing: model.norm.weight in .*; write"):
        load_reference_model(tiny_target, "auto")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"^damaged weight file: .*model.safetensors"):
        load_reference_model(tiny_target, "auto")
    path.unlink()
    with pytest.raises(UserError, match=r"^no weights: "):
        load_reference_model(tiny_target, "auto")
