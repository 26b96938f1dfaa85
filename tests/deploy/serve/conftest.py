"""A small chain whose tokens are bytes, and a server over it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from polybasic.deploy import Chain, load_chain
from tests.conftest import ChainParts
from tests.deploy.serve.serving import Served, serving, write_byte_tokenizer


@pytest.fixture(scope="session")
def byte_chain(_tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed chain with a byte-level tokenizer; not to be changed."""
    folder = tmp_path_factory.mktemp("bytes")
    models = Path(shutil.copytree(_tiny_models, folder / "models"))
    write_byte_tokenizer(models / "target")
    parts = ChainParts(models / "target", models / "intermediate", models / "draft")
    parts.package(folder / "chain")
    return folder / "chain"


@pytest.fixture(scope="session")
def chain(byte_chain: Path) -> Chain:
    """Four answers at a time."""
    return load_chain(byte_chain, dtype="float32", sequences=4)


@pytest.fixture(scope="session")
def server(chain: Chain) -> Iterator[Served]:
    """Of all tests that leave it as it is."""
    with serving(chain) as served:
        yield served
