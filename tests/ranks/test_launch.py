import json
import signal
import tempfile
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megabatch.ranks.launch import first_failure, reported_failure
from megabatch.ranks.scratch import remove_abandoned, scratch_folder


def test_what_a_killed_launcher_has_left_is_removed_and_what_is_in_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "megabatch-left"
    left.mkdir()
    (left / "launcher").touch()  # nobody holds its lock
    (tmp_path / "megabatch-folder-of-mine").mkdir()
    with scratch_folder() as scratch:
        remove_abandoned()
        assert scratch.exists() and not left.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["megabatch-folder-of-mine"]


def test_what_an_earlier_attempt_has_reported_is_over(tmp_path: Path) -> None:
    report = {"rank": 1, "exit_code": 1, "message": "boom", "trace": ""}
    for attempt in range(2):
        (tmp_path / f"run/attempt_{attempt}/1").mkdir(parents=True)
    (tmp_path / "run/attempt_0/1/error.json").write_text(json.dumps(report | {"attempt": 0}))
    assert reported_failure(tmp_path) is None
    (tmp_path / "run/attempt_1/1/error.json").write_text(json.dumps(report | {"attempt": 1, "message": "again"}))
    assert str(reported_failure(tmp_path)) == "again"


@pytest.mark.parametrize(
    ("exit_codes", "reported", "said"),
    [
        ([-signal.SIGTERM, 2], 1, "boom"),  # rank 0 was still starting when torchelastic told it to end
        ([1, -signal.SIGKILL], 0, "Signal 9 (SIGKILL)"),  # what rank 0 reports is that rank 1 is missing
        ([-signal.SIGABRT, -signal.SIGTERM], 0, "boom"),  # it has reported, and then crashed
        ([-signal.SIGTERM, 3], None, "ended with exit code 3"),
        ([-signal.SIGTERM], None, "Signal 15 (SIGTERM)"),
    ],
)
def test_the_rank_that_failed_first_is_told_from_those_that_were_ended(
    tmp_path: Path, exit_codes: list[int], reported: int | None, said: str
) -> None:
    if reported is not None:
        report = {"attempt": 0, "rank": reported, "exit_code": 2, "message": "boom", "trace": ""}
        (tmp_path / "error.json").write_text(json.dumps(report))
    failures = {rank: ProcessFailure(rank, 1, code, error_file="none") for rank, code in enumerate(exit_codes)}
    assert str(first_failure(tmp_path, failures)).startswith(said)
