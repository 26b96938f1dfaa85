"""The browser that the tests of pages share."""

from collections.abc import Iterator

import pytest

from tests.browser import CHROMIUM, Browser, browsing


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium; apt-get install chromium")
    with browsing(tmp_path_factory.mktemp("profile")) as browser:
        yield browser
