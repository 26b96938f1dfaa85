"""A chain of four models that answers many requests at a time."""

from pathlib import Path

import pytest

from polybasic.deploy import Chain, load_chain
from tests.deploy.noisy_chain import write_four_and_a_copy
from tests.deploy.runtime.sequences.asking import forget


@pytest.fixture(scope="module")
def folder(_tiny_four_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_four_and_a_copy(_tiny_four_models, tmp_path_factory.mktemp("many"))


@pytest.fixture(scope="module")
def loaded(folder: Path, request: pytest.FixtureRequest) -> Chain:
    dtype = getattr(request, "param", "bfloat16")
    return load_chain(folder, dtype=dtype, context_tokens=120, sequences=64)


@pytest.fixture
def chain(loaded: Chain) -> Chain:
    forget(loaded)
    return loaded
