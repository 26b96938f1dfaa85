"""A live server over a small chain whose tokens are bytes, and that chain."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from polybasic.deploy import Chain, load_chain
from tests.conftest import ChainParts
from tests.deploy.serve.serving import Served, serving, serving_tools, write_byte_tokenizer


@pytest.fixture(scope="session")
def chain(_tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """Its folder `tokenizer` is the clients' local tokenizer."""
    folder = tmp_path_factory.mktemp("clients")
    models = Path(shutil.copytree(_tiny_models, folder / "models"))
    write_byte_tokenizer(models / "target")
    ChainParts(models / "target", models / "intermediate", models / "draft").package(
        folder / "chain"
    )
    return load_chain(folder / "chain", dtype="float32", sequences=4)


@pytest.fixture(scope="session")
def server(chain: Chain) -> Iterator[Served]:
    with serving(chain) as served:
        yield served


@pytest.fixture(scope="session")
def server_of_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Over a target whose chat template has tools."""
    with serving_tools(tmp_path_factory.mktemp("tools")) as served:
        yield served
