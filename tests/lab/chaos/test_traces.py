import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from megabatch_lab.chaos import judge
from megabatch_lab.chaos.judge import Traces, unfinished
from megabatch_lab.chaos.processes import MARK, end_marked, is_alive, marked, ranks_of

LISTEN = """
import socket, subprocess, sys
server = socket.create_server(("127.0.0.1", 0))
child = subprocess.Popen(["sleep", "60"])
print(server.getsockname()[1], child.pid, flush=True)
sys.stdin.read()
"""


@contextmanager
def process(mark: str, **settings: str) -> Iterator[tuple[int, int, int]]:
    """Start a process; yield its id, the port it listens on, and its child."""
    started = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", LISTEN],
        env={**os.environ, MARK: mark, **settings},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout
    try:
        port, child = map(int, started.stdout.readline().split())
        yield started.pid, port, child
    finally:
        end_marked(mark)
        started.communicate()


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Traces:
    monkeypatch.setattr(judge, "LINGER_S", 0.1)
    for name in ("tmp", "shm"):
        (tmp_path / name).mkdir()
    (tmp_path / "shm" / "of another").touch()
    return Traces(f"{os.getpid()}-traces", tmp_path / "tmp", tmp_path / "shm")


def test_processes_are_found_by_their_mark_with_rank_and_port(traces: Traces) -> None:
    with process(traces.mark, RANK="3") as (parent, port, child), process(f"{traces.mark}-other"):
        assert sorted(marked(traces.mark)) == sorted([parent, child])
        assert ranks_of(traces.mark) == {3: parent}, "a child of a rank is not a rank"
        assert sorted(traces.left()) == sorted(
            [
                f"process {parent} (rank 3) remains, listening on {port}",
                f"process {child} (rank 3) remains",
            ]
        )
    assert not is_alive(parent) and not is_alive(child)
    assert marked(traces.mark) == [] and traces.left() == []


def test_new_files_are_reported_once(traces: Traces) -> None:
    assert traces.left() == []
    (traces.temporary / "megabatch-x").mkdir()
    (traces.shared_memory / "torch_1").touch()
    used = traces.shared_memory / "of a running process"
    with used.open("wb"):
        found = traces.left()
        assert found == [
            f"{traces.shared_memory / 'torch_1'} remains",
            f"{traces.temporary / 'megabatch-x'} remains",
        ]
        assert traces.left() == []
    assert traces.left() == [f"{used} remains"]


def test_file_that_another_process_removes_is_not_reported(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    passing = traces.shared_memory / "torch_2"
    passing.touch()

    def look_for_users(files: set[Path]) -> set[Path]:
        passing.unlink()
        return in_use(files)

    in_use = judge.in_use
    monkeypatch.setattr(judge, "in_use", look_for_users)
    assert traces.left() == []


def test_partial_files_of_a_run_are_found(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step-1").mkdir(parents=True)
    assert unfinished(tmp_path) == []
    (tmp_path / "checkpoints/.writing-step-2-77").mkdir()
    (tmp_path / ".writing-model.json-77").touch()
    assert len(unfinished(tmp_path)) == 2
