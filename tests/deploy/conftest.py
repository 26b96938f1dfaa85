"""What several tests share: a browser, and counts of what is drawn together."""

from collections.abc import Iterator

import pytest
from torch import Tensor

from polybasic.deploy.runtime.rounds import draws
from tests.browser import CHROMIUM, Browser, browsing


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium; apt-get install chromium")
    with browsing(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def num_drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each time that draws are found together, the rows."""
    num_rows: list[int] = []
    most_probable = draws.most_probable

    def counted(logits: Tensor) -> list[int]:
        num_rows.append(len(logits))
        return most_probable(logits)

    monkeypatch.setattr(draws, "most_probable", counted)
    return num_rows
