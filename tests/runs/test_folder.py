import errno
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megabatch.config.loading import load_config
from megabatch.errors import NotSaved, UserError
from megabatch.io.disk import write_file
from megabatch.runs.folder import RunFolder, append_to_log
from megabatch.runs.reader import is_running, length_up_to
from tests.support.file_limits import file_size_limit
from tests.support.records import step_record

HOLD = "import sys, pathlib; from megabatch.runs.folder import RunFolder; RunFolder(pathlib.Path(sys.argv[1]))"


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    assert not is_running(tmp_path)
    with RunFolder(tmp_path / "run"):
        assert is_running(tmp_path / "run")
        other = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path / "run")], capture_output=True, text=True)
        assert other.returncode == 1 and "is in use by process" in other.stderr
        with pytest.raises(UserError, match="in use"):
            RunFolder(tmp_path / "run")
    assert not is_running(tmp_path / "run")
    with RunFolder(tmp_path / "run"):
        pass


def test_rows_after_the_checkpoint_and_incomplete_rows_are_dropped(tmp_path: Path) -> None:
    rows = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) + "\n" for step in (1, 2, 2, 3)]
    rows.write_text("".join(lines) + '{"step"')
    assert length_up_to(rows, 2) == len("".join(lines[:3]))
    assert length_up_to(rows, 9) == len("".join(lines))
    with RunFolder(tmp_path) as folder:
        folder.begin(load_config("fashion").to_toml(), {}, step=2)
        folder.write(step_record(3, epoch=1.0, loss=1.0))
    assert [json.loads(line)["step"] for line in rows.read_text().splitlines()] == [1, 2, 2, 3]


def test_run_that_starts_over_keeps_no_rows(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step":1}\n')
    with RunFolder(tmp_path) as folder:
        folder.begin(load_config("fashion").to_toml(), {}, step=0)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert load_config(str(tmp_path / "config.toml")) == load_config("fashion")


def rows_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@contextmanager
def open_folder(path: Path) -> Iterator[tuple[RunFolder, list[str]]]:
    """Open a run's folder; yield it and the list of its reported lines."""
    reported: list[str] = []
    with RunFolder(path) as folder:
        folder.outage.report = lambda name, text: reported.append(f"{name}: {text}")
        folder.begin(load_config("fashion").to_toml(), {}, step=0)
        yield folder, reported


def test_rows_wait_for_a_full_disk_and_are_written_in_order(tmp_path: Path) -> None:
    """The limit leaves an incomplete row."""
    with open_folder(tmp_path) as (folder, reported):
        folder.write(step_record(1, epoch=1.0, loss=1.0))
        with file_size_limit((tmp_path / "metrics.jsonl").stat().st_size + 20):
            for step in (2, 3, 4):
                folder.write(step_record(step, epoch=1.0, loss=1.0))
            with pytest.raises(OSError, match="File too large"):
                folder.sync_rows()
            half = (tmp_path / "metrics.jsonl").read_bytes().splitlines()[1]
            assert len(half) == 20
        assert len(reported) == 1 and "File too large" in reported[0] and "ulimit -f" in reported[0]
        folder.sync_rows()
        assert rows_in(tmp_path) == [1, 2, 3, 4]
        assert reported[1:] == ["saved: all pending data is written"]


def test_rows_in_memory_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megabatch.runs.folder.MOST_WAITING_BYTES", 1000)
    with open_folder(tmp_path) as (folder, _), file_size_limit(1):
        folder.write(step_record(1, epoch=1.0, loss=1.0))
        with pytest.raises(NotSaved, match=r"metrics\.jsonl cannot be written"):
            for step in range(2, 9):
                folder.write(step_record(step, epoch=1.0, loss=1.0))


def test_rows_are_written_again_after_a_failed_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed fsync marks the data as clean, so a second fsync succeeds without writing it."""
    with open_folder(tmp_path) as (folder, reported):
        folder.write(step_record(1, epoch=1.0, loss=1.0))
        before = (tmp_path / "metrics.jsonl").stat().st_ino
        with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output"):
            patch.setattr("os.fsync", fail_to_sync)
            folder.sync_rows()
        folder.write(step_record(2, epoch=1.0, loss=1.0))
        folder.sync_rows()
        folder.write(step_record(3, epoch=1.0, loss=1.0))
        assert (tmp_path / "metrics.jsonl").stat().st_ino != before and rows_in(tmp_path) == [1, 2, 3]
        assert "check that disk for errors" in reported[0] and reported[1:] == ["saved: all pending data is written"]


def fail_to_sync(descriptor: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("is_moved", [False, True])
def test_removed_or_moved_folder_is_created_again_with_all_rows(tmp_path: Path, is_moved: bool) -> None:
    path = tmp_path / "runs/one"
    with open_folder(path) as (folder, reported):
        folder.write_text("model.json", "{}")
        folder.write(step_record(1, epoch=1.0, loss=1.0))
        if is_moved:
            path.rename(tmp_path / "elsewhere")
        else:
            shutil.rmtree(tmp_path / "runs")
        folder.write(step_record(2, epoch=1.0, loss=1.0))
        folder.sync_rows()
        folder.write(step_record(3, epoch=1.0, loss=1.0))
        assert rows_in(path) == [1, 2, 3] and is_running(path)
        assert load_config(str(path / "config.toml")) == load_config("fashion")
        assert (path / "model.json").read_text() == "{}" and (path / "env.json").read_text() == "{}\n"
        assert len(reported) == 1 and f"{path} was removed during the run; it was created again" in reported[0]
    assert not is_running(path)


def test_texts_can_be_written_while_the_folder_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    with RunFolder(path) as folder:
        folder.begin("seed = 1\n", {}, 0)
        folder.write_text("plan.json", "older")

        def write_texts() -> None:
            folder.write_text("plan.json", "newer")
            folder.write_text("step.json", "{}")

        training = threading.Thread(target=write_texts)

        def write_meanwhile(*args: Any, **options: Any) -> Path:
            if not training.ident:
                training.start()
                training.join(0.1)
            return write_file(*args, **options)

        shutil.rmtree(path)
        monkeypatch.setattr("megabatch.runs.folder.write_file", write_meanwhile)
        folder.sync_rows()
        training.join()
    assert (path / "plan.json").read_text() == "newer" and (path / "step.json").exists()


def test_failing_log_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.log").mkdir()
    with open_folder(tmp_path) as (folder, _):
        folder.log("hello")
    assert not append_to_log(tmp_path, "hello") and not append_to_log(tmp_path / "nowhere", "hello")
