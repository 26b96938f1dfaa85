"""A chain, loaded once for all tests of targets elsewhere, whole and its target alone."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from polybasic.deploy import Chain, load_chain
from polybasic.deploy.runtime import load
from tests.conftest import ChainParts
from tests.deploy.runtime.remote.far import Far, loaded_target, serving


@pytest.fixture(scope="session")
def folder(_tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the chain; not to be changed."""
    folder = tmp_path_factory.mktemp("remote") / "chain"
    parts = ChainParts(*(_tiny_models / name for name in ("target", "intermediate", "draft")))
    parts.package(folder)
    return folder


@pytest.fixture(scope="session")
def near_folder(folder: Path) -> Path:
    """The same without the target's weights."""
    copy = Path(shutil.copytree(folder, folder.with_name("near")))
    (copy / "target" / "model.safetensors").unlink()
    return copy


@pytest.fixture(scope="session")
def local(folder: Path) -> Chain:
    """The chain on one machine."""
    return load_chain(folder, digests=False, dtype="float32")


@pytest.fixture(scope="session")
def target(folder: Path) -> Chain:
    """Its target alone, for three answers at a time."""
    return loaded_target(folder, sequences=3)


@pytest.fixture(autouse=True)
def _keeps_what_is_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains are loaded again and again here, and looking for what can be freed takes longest."""
    monkeypatch.setattr(load, "release_unused", lambda device: None)


@pytest.fixture
def far(target: Chain, near_folder: Path) -> Iterator[Far]:
    """The target, served."""
    with serving(target, near_folder) as far:
        yield far
