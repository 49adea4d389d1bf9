import json
import tempfile
from pathlib import Path

import pytest

from megabatch.comm.launch import make_notes, reported_failure, sweep_notes


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


def test_what_an_earlier_attempt_has_reported_is_over(tmp_path: Path) -> None:
    report = {"rank": 1, "exit_code": 1, "message": "boom", "trace": ""}
    for attempt in range(2):
        (tmp_path / f"run/attempt_{attempt}/1").mkdir(parents=True)
    (tmp_path / "run/attempt_0/1/error.json").write_text(json.dumps(report | {"attempt": 0}))
    assert reported_failure(tmp_path) is None
    (tmp_path / "run/attempt_1/1/error.json").write_text(json.dumps(report | {"attempt": 1, "message": "again"}))
    assert str(reported_failure(tmp_path)) == "again"
