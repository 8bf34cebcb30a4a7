"""What tests of the lab share: an empty folder of data."""

import pytest
from lab import data


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty data folder, in replay: nothing that was loaded before is known."""
    monkeypatch.setenv("NDL_DATA", str(tmp_path))
    monkeypatch.setenv("NDL_MODE", "replay")
    data._load.cache_clear()
    yield tmp_path
    data._load.cache_clear()
