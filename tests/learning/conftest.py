"""Fixtures of tests that start real runs."""

from pathlib import Path

import pytest

from tests.helpers.warm import SERVERS


@pytest.fixture
def ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder to which engine servers write their process ids."""
    folder = tmp_path / "ids"
    folder.mkdir()
    monkeypatch.setenv(SERVERS, str(folder))
    return folder
