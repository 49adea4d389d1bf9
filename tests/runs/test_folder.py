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


def test_rows_beyond_the_checkpoint_and_half_rows_are_cut(tmp_path: Path) -> None:
    rows = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) + "\n" for step in (1, 2, 2, 3)]
    rows.write_text("".join(lines) + '{"step"')
    assert length_up_to(rows, 2) == len("".join(lines[:3]))
    assert length_up_to(rows, 9) == len("".join(lines))
    with RunFolder(tmp_path) as folder:
        folder.begin(load_config("fashion").to_toml(), {}, step=2)
        folder.write(step_record(3, epoch=1.0, loss=1.0))
    assert [json.loads(line)["step"] for line in rows.read_text().splitlines()] == [1, 2, 2, 3]


def test_a_run_that_begins_again_keeps_no_rows(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step":1}\n')
    with RunFolder(tmp_path) as folder:
        folder.begin(load_config("fashion").to_toml(), {}, step=0)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert load_config(str(tmp_path / "config.toml")) == load_config("fashion")


def rows_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@contextmanager
def begun(path: Path) -> Iterator[tuple[RunFolder, list[str]]]:
    """A run's folder, and what it has to say."""
    said: list[str] = []
    with RunFolder(path) as folder:
        folder.outage.say = lambda name, text: said.append(f"{name}: {text}")
        folder.begin(load_config("fashion").to_toml(), {}, step=0)
        yield folder, said


def test_rows_that_a_disk_does_not_take_wait_and_follow_in_order(tmp_path: Path) -> None:
    """The limit cuts a row in two."""
    with begun(tmp_path) as (folder, said):
        folder.write(step_record(1, epoch=1.0, loss=1.0))
        with file_size_limit((tmp_path / "metrics.jsonl").stat().st_size + 20):
            for step in (2, 3, 4):
                folder.write(step_record(step, epoch=1.0, loss=1.0))
            with pytest.raises(OSError, match="File too large"):
                folder.sync_rows()
            half = (tmp_path / "metrics.jsonl").read_bytes().splitlines()[1]
            assert len(half) == 20
        assert len(said) == 1 and "File too large" in said[0] and "ulimit -f" in said[0]
        folder.sync_rows()
        assert rows_in(tmp_path) == [1, 2, 3, 4]
        assert said[1:] == ["saved: again, with all that waited"]


def test_rows_in_memory_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megabatch.runs.folder.MOST_WAITING_BYTES", 1000)
    with begun(tmp_path) as (folder, _), file_size_limit(1):
        folder.write(step_record(1, epoch=1.0, loss=1.0))
        with pytest.raises(NotSaved, match=r"metrics\.jsonl could not be written to for long"):
            for step in range(2, 9):
                folder.write(step_record(step, epoch=1.0, loss=1.0))


def test_rows_that_a_disk_has_failed_to_keep_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed fsync the kernel takes them for written: another one says nothing."""
    with begun(tmp_path) as (folder, said):
        folder.write(step_record(1, epoch=1.0, loss=1.0))
        before = (tmp_path / "metrics.jsonl").stat().st_ino
        with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output"):
            patch.setattr("os.fsync", fail_to_sync)
            folder.sync_rows()
        folder.write(step_record(2, epoch=1.0, loss=1.0))
        folder.sync_rows()
        folder.write(step_record(3, epoch=1.0, loss=1.0))
        assert (tmp_path / "metrics.jsonl").stat().st_ino != before and rows_in(tmp_path) == [1, 2, 3]
        assert "see what is wrong with that disk" in said[0] and said[1:] == ["saved: again, with all that waited"]


def fail_to_sync(descriptor: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_folder_that_is_removed_or_moved_under_a_run_is_made_again_with_all_rows(
    tmp_path: Path, is_moved: bool
) -> None:
    path = tmp_path / "runs/one"
    with begun(path) as (folder, said):
        folder.describe("model.json", "{}")
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
        assert len(said) == 1 and f"{path} was removed under this run; it is made again" in said[0]
    assert not is_running(path)


def test_a_run_describes_itself_while_its_folder_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    with RunFolder(path) as folder:
        folder.begin("seed = 1\n", {}, 0)
        folder.describe("plan.json", "older")

        def describe() -> None:
            folder.describe("plan.json", "newer")
            folder.describe("step.json", "{}")

        training = threading.Thread(target=describe)

        def write_while_it_is_described(*args: Any, **options: Any) -> Path:
            if not training.ident:
                training.start()
                training.join(0.1)
            return write_file(*args, **options)

        shutil.rmtree(path)
        monkeypatch.setattr("megabatch.runs.folder.write_file", write_while_it_is_described)
        folder.sync_rows()
        training.join()
    assert (path / "plan.json").read_text() == "newer" and (path / "step.json").exists()


def test_the_log_fails_for_nobody(tmp_path: Path) -> None:
    (tmp_path / "train.log").mkdir()
    with begun(tmp_path) as (folder, _):
        folder.log("hello")
    assert not append_to_log(tmp_path, "hello") and not append_to_log(tmp_path / "nowhere", "hello")
