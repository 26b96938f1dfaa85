"""Downloads from a hub: what is fetched, at which commit, after a cut, and how it is refused."""

import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file

from polybasic.chain.base.caching import CACHE_VARIABLE
from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.chains import resolve_chain
from polybasic.chain.formats.checkpoints.checkpoint import (
    load_tensors,
    resolve_adapter,
    resolve_head,
)
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.models import resolve_model
from polybasic.chain.formats.gguf.writing import write_gguf
from polybasic.chain.formats.verify import check_chain
from tests.chain.fake_hub import Hub, Repository, serve
from tests.checkpoints import write_family
from tests.conftest import ChainParts

ROOT = Path(__file__).parents[3]
GATED = (403, "GatedRepo")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """An empty hub; this process asks it, with a cache of its own."""
    with serve() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_checkpoint_is_fetched_with_what_it_needs_and_nothing_else(
    hub: Hub, tiny_target: Path
) -> None:
    needed = names_in(tiny_target)
    files = {name: (tiny_target / name).read_bytes() for name in needed}
    files |= {"LICENSE": b"terms", "USE_POLICY.md": b"policy", "tokenizer.model": b"pieces"}
    needed += ["LICENSE", "USE_POLICY.md", "tokenizer.model"]
    unneeded = ("pytorch_model.bin", "consolidated.safetensors", "consolidated.00.pth")
    unneeded += ("original/params.json", "original/tokenizer.model", "model.gguf", "modeling.py")
    files |= dict.fromkeys(unneeded, b"not to be fetched")
    repository = hub.repositories["org/name"] = Repository()
    commit = repository.commit(files)
    folder = resolve_model("org/name")
    assert folder.name == commit
    assert names_in(folder) == sorted(needed) == hub.downloads()
    assert all((folder / name).read_bytes() == files[name] for name in needed)
    hub.requests.clear()
    assert resolve_model("org/name", commit) == folder
    assert hub.requests == [], "a commit that is in the cache needs no network"


def test_pickles_are_fetched_where_there_are_no_safetensors(hub: Hub) -> None:
    weights = {"pytorch_model-00001-of-00001.bin": b"x", "pytorch_model.bin.index.json": b"{}"}
    files = {"config.json": b"{}", "training_args.bin": b"x", "tf_model.h5": b"x"}
    hub.repositories["org/name"] = Repository()
    hub.repositories["org/name"].commit(files | weights)
    assert names_in(resolve_model("org/name")) == sorted(["config.json", *weights])


def test_a_gguf_file_is_fetched_alone(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "models"))
    write_family(tmp_path / "model", "qwen2")
    write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    data = (tmp_path / "model.gguf").read_bytes()
    names = ["a.gguf", "b-00001-of-00001.gguf", "other/a.gguf"]
    # equal files would be fetched once
    files = {name: data + bytes(number) for number, name in enumerate(names)}
    repository = hub.repositories["org/name-GGUF"] = Repository()
    commit = repository.commit({**files, "README.md": b"x", "c.gguf": b"x"})
    for name in names:
        hub.requests.clear()
        for reference in (f"org/name-GGUF/{name}", f"org/name-GGUF/{name}@{commit}"):
            assert read_config(resolve_model(reference)).decoder.num_layers == 3
        assert hub.downloads() == [name]
    assert resolve_chain("org/name-GGUF/a.gguf").parent == tmp_path / "models" / "chains"
    with pytest.raises(UserError, match=r"GGUF file not found: d\.gguf in org/name-GGUF"):
        resolve_model("org/name-GGUF/d.gguf")
    with pytest.raises(UserError, match="not a GGUF file"):
        resolve_model("org/name-GGUF/c.gguf")
    with pytest.raises(UserError, match="not a checkpoint"):
        resolve_model("org/name-GGUF")


def test_a_revision_is_a_tag_a_branch_or_a_commit(hub: Hub) -> None:
    repository = hub.repositories["org/name"] = Repository()
    old = repository.commit({"config.json": b'{"one": 1}', "model.safetensors": b"1"}, "v1")
    new = repository.commit({"config.json": b'{"one": 2}', "model.safetensors": b"2"}, "v2")
    for reference, commit in (
        ("org/name", new),
        ("org/name@v1", old),
        ("org/name@v2", new),
        (f"org/name@{old}", old),
    ):
        assert resolve_model(reference).name == commit
    assert resolve_model("org/name", "v1").name == old
    with pytest.raises(UserError, match=r"^revision not found: org/name@v3; see http\S+/commits"):
        resolve_model("org/name@v3")


def test_a_file_that_was_cut_is_continued(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tiny_target: Path
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    expected = load_file(tiny_target / "model.safetensors")
    hub.repositories["org/name"] = Repository()
    hub.repositories["org/name"].commit(tiny_target)
    hub.cuts["model.safetensors"] = [1000, 3000]
    tensors = load_tensors(resolve_model("org/name"))
    assert all(tensors[name].equal(tensor) for name, tensor in expected.items())
    ranges = [range for _, path, range in hub.requests if path.endswith("model.safetensors")]
    assert ranges[-3:] == [None, "bytes=1000-", "bytes=4000-"]


def test_a_download_that_broke_off_goes_on_with_what_is_missing(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tiny_target: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    hub.repositories["org/name"] = Repository()
    hub.repositories["org/name"].commit(tiny_target)
    hub.cuts["model.safetensors"] = [0] * 6
    with pytest.raises(UserError, match=r"^download failed: org/name \(.+\); run again to resume"):
        resolve_model("org/name")
    assert "config.json" in hub.downloads()
    hub.requests.clear()
    folder = resolve_model("org/name")
    assert hub.downloads() == ["model.safetensors"]
    assert names_in(folder) == names_in(tiny_target)


def test_a_hub_that_refuses(hub: Hub, monkeypatch: pytest.MonkeyPatch, tiny_target: Path) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    repository = hub.repositories["org/name"] = Repository(refusal=GATED)
    repository.commit(tiny_target)
    with pytest.raises(UserError) as refused:
        resolve_model("org/name")
    assert str(refused.value) == (
        f"gated repository: org/name; accept its terms at {hub.url}/org/name, then `hf auth login`"
    )
    with pytest.raises(UserError, match=r"^repository not found: org/nothing is neither a folder"):
        resolve_model("org/nothing")
    repository.refusal = (503, "")
    with pytest.raises(UserError, match=r"^download failed: org/name \(.*503.*\); run again"):
        resolve_model("org/name")
    repository.refusal = None
    assert names_in(resolve_model("org/name")) == names_in(tiny_target)


def test_without_a_network_the_cache_is_enough(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tiny_target: Path
) -> None:
    hub.repositories["org/name"] = Repository()
    hub.repositories["org/name"].commit(tiny_target)
    folder = resolve_model("org/name")
    unreached = r"^hub not reached: org/other is no folder here and not whole in the hub's cache"
    for name, value in (("ENDPOINT", "http://127.0.0.1:9"), ("HF_HUB_OFFLINE", True)):
        monkeypatch.setattr(constants, name, value)
        assert resolve_model("org/name") == folder
        with pytest.raises(UserError, match=unreached):
            resolve_model("org/other")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"^hub not reached: org/name is no folder here and not"):
        resolve_model("org/name")


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_adapters_and_heads(hub: Hub, suffix: str) -> None:
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    adapter = {"adapter_config.json": b"{}", f"adapter_model.{suffix}": b"x"}
    head = {"config.json": b"{}", f"{stem}.{suffix}": b"x"}
    beside = {"README.md": b"x", "optimizer.pt": b"x", "checkpoint-1/config.json": b"{}"}
    for name, files in (("adapter", adapter | {"tokenizer.json": b"{}"}), ("head", head)):
        hub.repositories[f"org/{name}"] = Repository()
        hub.repositories[f"org/{name}"].commit(files | beside)
    assert names_in(resolve_adapter("org/adapter")) == [*sorted(adapter), "tokenizer.json"]
    assert names_in(resolve_head("org/head")) == sorted(head)
    with pytest.raises(UserError, match=r"^not an adapter: .* \(no adapter_config.json in it\)"):
        resolve_adapter("org/head")
    with pytest.raises(UserError, match=r"^not a draft head: .* \(no config.json in it\)"):
        resolve_head("org/adapter")


def test_an_adapter_or_head_without_weights(hub: Hub, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=r"^no weights: .* holds no adapter_model.safetensors or"):
        resolve_adapter(str(tmp_path))
    with pytest.raises(UserError, match=r"^no weights: .* holds neither model.safetensors nor"):
        resolve_head(str(tmp_path))


def test_a_head_in_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "some_heads"
    (package / "heads" / "head").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('code of the package was run')")
    for name in ("config.json", "model.safetensors"):
        (package / "heads" / "head" / name).write_bytes(b"{}")
    (package / "heads" / "linked").symlink_to(tmp_path)
    monkeypatch.syspath_prepend(str(package.parent))
    assert resolve_head("package:some_heads/heads/head") == package / "heads" / "head"
    for reference, line in (
        ("package:some_heads/heads/none", "draft head not found: heads/none in "),
        ("package:some_heads/heads", "not a draft head"),
        ("package:some_heads/heads/linked", "link leaves the package"),
        ("package:no_such_heads/head", "pip install no-such-heads"),
    ):
        with pytest.raises(UserError, match=line):
            resolve_head(reference)


def test_a_chain_is_fetched_whole(hub: Hub, tiny_chain: Path) -> None:
    hub.repositories["org/chain"] = Repository()
    commit = hub.repositories["org/chain"].commit(tiny_chain)
    folder = resolve_chain("org/chain")
    assert folder.name == commit
    assert names_in(folder) == names_in(tiny_chain)
    check_chain(folder)


def test_a_chain_refers_to_its_target_at_the_commit_that_it_was_packed_with(
    hub: Hub, tiny_chain_parts: ChainParts, tmp_path: Path
) -> None:
    repository = hub.repositories["org/target"] = Repository()
    packed = repository.commit(tiny_chain_parts.target)
    manifest = tiny_chain_parts.package(
        tmp_path / "chain",
        target=resolve_model("org/target"),
        target_reference="org/target",
        copy_target=False,
    )
    reference = manifest.members[0].reference
    assert (reference.source, reference.revision) == ("org/target", packed)
    (tiny_chain_parts.target / "config.json").write_text("{}")
    moved = repository.commit(tiny_chain_parts.target)
    assert resolve_model("org/target").name == moved != packed
    for path in (tmp_path / "cache", tmp_path / "elsewhere"):
        constants.HF_HUB_CACHE = str(path)  # the fixture puts it back
        assert check_chain(tmp_path / "chain").target.name == packed
    assert (tmp_path / "elsewhere" / "models--org--target" / "snapshots" / packed).is_dir()


@pytest.mark.parametrize(
    "name", ["../../../../evil.json", "/evil.json", "a/../../evil.json", "..\\evil.json", "\ud800"]
)
def test_names_that_lead_out_of_the_cache_are_refused(hub: Hub, tmp_path: Path, name: str) -> None:
    repository = hub.repositories["org/name"] = Repository()
    repository.commit({"chain.json": b"{}", name: b"evil"})
    with pytest.raises(UserError, match=r"unusable repository: org/name \("):
        resolve_chain("org/name")
    assert not [path for path in tmp_path.rglob("*") if "evil" in path.name]


@pytest.mark.parametrize("commit", [None, 7])
def test_commits_that_are_none_are_refused(hub: Hub, commit: Any) -> None:
    repository = hub.repositories["org/name"] = Repository()
    repository.commits[commit] = {"chain.json": b"{}"}
    repository.refs["main"] = commit
    with pytest.raises(UserError, match=r"unusable repository: org/name \("):
        resolve_chain("org/name")


def asked_environment(hub: Hub, cache: Path) -> dict[str, str]:
    """For a process of its own that asks `hub`."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    return environment | {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache)}


def test_the_command_line_tells_a_gated_repository_in_one_line(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["org/chain"] = Repository(refusal=GATED)
    hub.repositories["org/chain"].commit({"chain.json": b"{}"})
    command = [sys.executable, "-m", "polybasic.recipes.cli.main", "inspect", "org/chain"]
    environment = asked_environment(hub, tmp_path / "cache")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"error: gated repository: org/chain; accept its terms at {hub.url}/org/chain, "
        "then `hf auth login`"
    )


def test_a_terminal_sees_the_progress(hub: Hub, tiny_target: Path, tmp_path: Path) -> None:
    hub.repositories["org/name"] = Repository()
    hub.repositories["org/name"].commit(tiny_target)
    code = (
        "from polybasic.chain.formats.checkpoints.models import resolve_model\n"
        "print(resolve_model('org/name').name)"
    )
    terminal, attached = pty.openpty()
    termios.tcsetwinsize(attached, (24, 100))
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=attached,
        env=asked_environment(hub, tmp_path / "cache"),
        cwd=ROOT,
        text=True,
    )
    os.close(attached)
    assert done.returncode == 0
    assert done.stdout.split() == [hub.repositories["org/name"].refs["main"]]
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    num_files = len(names_in(tiny_target))
    assert f"{num_files}/{num_files}" in shown
    assert "Download" in shown
