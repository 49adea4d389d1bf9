"""The one atomic write and the one lock."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megabatch.io import disk
from tests.support.disk_events import record_disk_events

HOLD = """
import sys, time
from pathlib import Path
from megabatch.io import disk

lock = disk.take_lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(100)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Start another process that holds the lock of `tmp_path`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_reader_sees_the_complete_old_or_new_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [bytes([letter]) * 300_000 for letter in b"ab"]
    disk.write_file(path, contents[0])
    ended = threading.Event()
    seen: set[bytes] = set()

    def read() -> None:
        while not ended.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(60):
        disk.write_file(path, contents[number % 2])
    ended.set()
    reader.join()
    assert seen and seen <= set(contents)


@pytest.mark.parametrize("content", ["text: ü\n", b"\x00\xff", memoryview(b"view")])
def test_content_is_read_back_unchanged(tmp_path: Path, content: str | bytes | memoryview) -> None:
    path = disk.write_file(tmp_path / "file", content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else bytes(content))
    assert names_in(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("is_folder", [False, True])
def test_an_exception_leaves_only_the_old_file(tmp_path: Path, error: type[BaseException], is_folder: bool) -> None:
    disk.write_file(tmp_path / "file", "old")
    with pytest.raises(error), disk.writing(tmp_path / "file") as new:
        if is_folder:
            new.mkdir()
            (new / "part").write_text("ha")
        else:
            new.write_text("ha")
        raise error
    assert names_in(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "old"


def test_a_folder_appears_with_all_its_content(tmp_path: Path) -> None:
    with disk.writing(tmp_path / "folder") as new:
        (new / "deep/er").mkdir(parents=True)
        (new / "deep/er/file").write_text("content")
        assert not (tmp_path / "folder").exists()
    assert (tmp_path / "folder/deep/er/file").read_text() == "content" and names_in(tmp_path) == ["folder"]


def test_content_is_synced_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = record_disk_events(monkeypatch)
    with disk.writing(tmp_path / "folder") as new:
        new.mkdir()
        (new / "file").write_text("content")
    assert events == [("sync", "file"), ("sync", ".writing-folder"), ("rename", "folder"), ("sync", tmp_path.name)]


def test_only_unfinished_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    disk.write_file(tmp_path / "file", "whole")
    (tmp_path / f"{disk.WRITING}file-123").write_text("ha")
    (tmp_path / f"{disk.WRITING}folder-123").mkdir()
    (tmp_path / f"{disk.WRITING}folder-123/part").write_text("ha")
    (tmp_path / f"{disk.WRITING}link-123").symlink_to(tmp_path / "file")
    disk.remove_unfinished(tmp_path)
    assert names_in(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "whole"


def test_a_link_points_to_its_newest_target(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        disk.replace_link(tmp_path / "latest", name)
        assert (tmp_path / "latest").readlink() == Path(name)
    assert names_in(tmp_path) == ["latest", "one", "two"]


def test_a_lock_names_its_holder_and_is_released_when_the_holder_is_killed(
    tmp_path: Path, holder: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "PATIENCE_S", 0.1)
    assert disk.is_locked(tmp_path / "lock")
    with pytest.raises(disk.Locked, match=f"lock is locked by process {holder.pid}") as refused:
        disk.take_lock(tmp_path / "lock")
    assert refused.value.holder == str(holder.pid)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert not disk.is_locked(tmp_path / "lock")
    with disk.take_lock(tmp_path / "lock"):
        assert (tmp_path / "lock").read_text() == str(os.getpid())


def test_a_waiting_process_gets_the_lock_when_its_holder_exits(tmp_path: Path, holder: "subprocess.Popen[str]") -> None:
    killer = threading.Timer(0.1, holder.kill)
    killer.start()
    with disk.take_lock(tmp_path / "lock", wait=True):
        assert holder.wait() == -signal.SIGKILL
        assert disk.is_locked(tmp_path / "lock")
    assert not disk.is_locked(tmp_path / "lock")


def test_is_locked_creates_no_file_and_does_not_take_the_lock(tmp_path: Path) -> None:
    assert not disk.is_locked(tmp_path / "lock") and names_in(tmp_path) == []
    with disk.take_lock(tmp_path / "lock"):
        assert disk.is_locked(tmp_path / "lock") and disk.is_locked(tmp_path / "lock")
    assert not disk.is_locked(tmp_path / "lock")
    with disk.take_lock(tmp_path / "lock"):
        pass


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize(
    ("umask", "folder", "file", "shared"), [(0o022, 0o700, 0o600, 0o644), (0o177, 0o600, 0o600, 0o600)]
)
def test_private_files_are_only_for_their_user_and_shared_ones_follow_the_umask(
    tmp_path: Path, umask: int, folder: int, file: int, shared: int
) -> None:
    before = os.umask(umask)
    try:
        disk.make_private(tmp_path / "folder")
        disk.write_file(tmp_path / "private", "x", is_private=True)
        disk.write_file(tmp_path / "shared", "x")
        disk.open_private(tmp_path / "log").close()
        disk.take_lock(tmp_path / "lock").close()
        disk.write_hashed(tmp_path / "hashed", [memoryview(b"x")])
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "folder") == folder and mode_of(tmp_path / "shared") == shared
    assert {mode_of(tmp_path / name) for name in ("private", "log", "lock", "hashed")} == {file}


@pytest.mark.parametrize("write", [disk.open_private, disk.take_lock, lambda path: disk.write_hashed(path, [])])
def test_private_files_are_not_written_through_a_link(tmp_path: Path, write: Callable[[Path], object]) -> None:
    (tmp_path / "victim").write_text("theirs")
    (tmp_path / "link").symlink_to("victim")
    with pytest.raises(OSError, match="symbolic links"):
        write(tmp_path / "link")
    disk.write_file(tmp_path / "link", "ours", is_private=True)  # replaces the link
    assert (tmp_path / "victim").read_text() == "theirs" and not (tmp_path / "link").is_symlink()


def test_temporary_names_are_not_predictable(tmp_path: Path) -> None:
    assert len({disk.temporary_path(tmp_path / "file") for _ in range(100)}) == 100


def test_a_pipe_named_like_a_lock_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    assert not disk.is_locked(tmp_path / "lock")


@pytest.mark.parametrize(
    ("owner", "mode", "problem"),
    [
        (1000, 0o40700, None),
        (1000, 0o40755, None),  # others can read which folders were indexed
        (1000, 0o40775, r"other users can write to it \(mode 775\); remove it, or chmod 700"),
        (1000, 0o41777, "other users can write to it"),
        (1001, 0o40700, "it belongs to user 1001, not to user 1000; set XDG_CACHE_HOME"),
    ],
)
def test_a_cache_is_trusted_only_if_no_other_user_could_write_it(owner: int, mode: int, problem: str | None) -> None:
    found = disk.trust_problem(owner, mode, user=1000)
    assert found is None if problem is None else found and re.match(problem, found)


def test_a_cache_writable_by_others_is_not_used_and_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk.cache_folder() == tmp_path / "megabatch" and mode_of(tmp_path / "megabatch") == 0o700
    (tmp_path / "megabatch").chmod(0o777)
    assert disk.cache_folder() is None and disk.cache_folder() is None
    assert capsys.readouterr().err.count("is not used: other users can write to it") == 1
