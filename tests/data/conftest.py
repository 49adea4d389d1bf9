from pathlib import Path

import pytest


@pytest.fixture
def index_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of this test alone; the folder in which it will lie."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megabatch"
