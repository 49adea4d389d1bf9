import tempfile
from pathlib import Path

import pytest

from megabatch.comm.launch import make_notes, sweep_notes


def test_what_a_killed_launcher_has_left_is_removed_and_what_is_in_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "megabatch-left"
    left.mkdir()
    (left / "launcher").touch()  # nobody holds its lock
    (tmp_path / "megabatch-notes-of-mine").mkdir()
    with make_notes() as notes:
        sweep_notes()
        assert notes.exists() and not left.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["megabatch-notes-of-mine"]
