"""Checkpoints that the tests of a session share, and only read."""

from functools import cache
from pathlib import Path

import pytest

from tests.chain.family_cases import CASES, Folders
from tests.checkpoints import write_family


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of a case's checkpoint, written when it is first asked for."""

    @cache
    def folder_of(case: str) -> Path:
        folder = tmp_path_factory.mktemp(case)
        family, changes = CASES[case]
        write_family(folder, family, **changes)
        return folder

    return folder_of
