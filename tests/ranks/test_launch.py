import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megabatch.ranks.failures import RankFailed, RankFailureReport
from megabatch.ranks.launch import (
    Attempt,
    file_store,
    first_failure,
    inherited_file,
    loopback_store,
    open_launcher_store,
)
from megabatch.ranks.signals import LAUNCHER, LauncherSignals, SignalHandler, Stopped, StopRequest
from megabatch.ranks.store import RankStore

NOBODY = 65_534


@pytest.mark.parametrize(
    ("exit_codes", "first"),
    [
        ([None, 0], None),
        ([2, None], (0, 2)),
        ([1, -signal.SIGKILL], (1, -signal.SIGKILL)),  # rank 0 only reports that rank 1 is missing
        ([1, 1], (0, 1)),
    ],
)
def test_a_killed_rank_is_the_cause_of_other_failures(
    exit_codes: list[int | None], first: tuple[int, int] | None
) -> None:
    assert first_failure(exit_codes) == first


def start(code: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-S", "-c", f"import os, signal, time\n{code}"])
    if code not in (HANGS, STOPS):
        process.wait()
    return process


EXITS, DIES, HANGS, STOPS = (
    "os._exit(1)",
    "os.kill(os.getpid(), signal.SIGSEGV)",
    "time.sleep(60)",
    "os.kill(os.getpid(), signal.SIGSTOP)",
)


@pytest.mark.parametrize(
    ("codes", "reported_by", "rank", "message"),
    [
        ([EXITS, STOPS], 0, 0, "boom"),  # the other one, which is stopped, is killed at once
        ([EXITS, DIES], 0, 1, "was ended by SIGSEGV while it was starting"),
        ([DIES], 0, 0, "boom"),  # it reported and then crashed
        (["os._exit(3)"], None, 0, "ended with exit code 3 while it was starting"),
    ],
)
def test_the_launcher_reports_the_first_failure(
    codes: list[str], reported_by: int | None, rank: int, message: str
) -> None:
    with open_launcher_store() as (store, _), LauncherSignals() as signals:
        if reported_by is not None:
            rank_store = object.__new__(RankStore)
            rank_store.persistent = store
            rank_store.report(RankFailureReport(reported_by, 1, "boom"))
        failed = Attempt([start(code) for code in codes], store, signals).wait()
    assert isinstance(failed, RankFailed)
    assert (failed.rank, str(failed)) == (rank, message)


def test_a_stopped_rank_is_killed_and_reported() -> None:
    with open_launcher_store() as (store, _), LauncherSignals() as signals:
        failed = Attempt([start(HANGS), start(STOPS)], store, signals, stop_s=0.2).wait()
    assert isinstance(failed, RankFailed)
    assert (failed.rank, str(failed)) == (1, "its process was stopped for 0.2 s, by a signal such as SIGSTOP")


def test_ranks_that_end_after_a_signal_raise_stopped() -> None:
    with open_launcher_store() as (store, _), LauncherSignals() as signals:
        signals.number = signal.SIGTERM
        with pytest.raises(Stopped):
            Attempt([start(HANGS)], store, signals).wait()  # it has no handler, so the signal kills it
        assert Attempt([start("os._exit(0)")], store, signals).wait() is None  # it had finished before the signal


@pytest.mark.parametrize("handler", [StopRequest, LauncherSignals])
def test_only_a_second_ctrl_c_ends_a_run_that_is_stopping(
    handler: type[SignalHandler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LAUNCHER, raising=False)
    monkeypatch.setattr(os, "_exit", lambda code: (_ for _ in ()).throw(KeyboardInterrupt(code)))
    stop = handler(signal.SIGUSR1)
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):  # as Slurm does at the end of a job's time
        stop.receive(number, None)
    assert stop.number == signal.SIGUSR1
    with pytest.raises(KeyboardInterrupt):
        stop.receive(signal.SIGINT, None)


def test_after_ctrl_c_ranks_do_not_wait_for_a_starting_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megabatch.ranks.launch.GRACE_S", 0.1)
    with open_launcher_store() as (store, _), LauncherSignals() as signals:
        starting = subprocess.Popen(
            [sys.executable, "-c", STARTING_RANK], env=os.environ | {LAUNCHER: str(os.getpid())}
        )
        waiting = subprocess.Popen(["sleep", "60"], preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
        while catches_interrupt(starting.pid):
            time.sleep(0.01)
        signals.number = signal.SIGINT
        with pytest.raises(Stopped):
            Attempt([waiting, starting], store, signals).wait()
    assert (waiting.returncode, starting.returncode) == (-signal.SIGKILL, -signal.SIGINT)


# Performs the first import of a rank; the sleep stands for a slow import of torch.
STARTING_RANK = "import time, megabatch.ranks.lifecycle; time.sleep(60)"


def catches_interrupt(process: int) -> bool:
    """Return whether SIGINT has a handler; Python sets one before it runs any code."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process}/status").read_text())
    running = "time.sleep" in Path(f"/proc/{process}/cmdline").read_text()
    return not running or caught is None or bool(int(caught[1], 16) >> (signal.SIGINT - 1) & 1)


def test_inherited_file_has_no_name_and_each_rank_can_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with inherited_file("seed = 7") as file:
        assert not list(tmp_path.iterdir())
        read = [sys.executable, "-c", f"print(open({file.path!r}).read())"]
        for _ in range(2):
            output = subprocess.run(read, pass_fds=file.descriptors, capture_output=True, text=True).stdout
            assert output == "seed = 7\n"


def test_loopback_store_listens_only_on_loopback() -> None:
    with loopback_store() as (store, handle):
        port = int(handle.variables["MASTER_PORT"])
        dist.TCPStore("127.0.0.1", port, is_master=False).set("a", "b")  # type: ignore[attr-defined]
        assert store.get("a") == b"b"
        listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        addresses = {fields[1] for fields in listening if fields[3] == "0A" and fields[1].endswith(f":{port:04X}")}
    assert addresses == {f"0100007F:{port:04X}"}


ADDS = "import os, torch.distributed as dist; print(dist.FileStore(os.environ['MEGABATCH_STORE'], -1).add('a', 1))"


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux: files in memory")
def test_only_processes_that_inherit_a_file_store_can_open_it() -> None:
    with file_store() as (store, handle):
        store.add("a", 1)
        command, environment = [sys.executable, "-c", ADDS], os.environ | handle.variables
        for number in (2, 3):
            done = subprocess.run(command, env=environment, pass_fds=handle.descriptors, capture_output=True, text=True)
            assert done.stdout == f"{number}\n"
        assert store.add("a", 0) == 3
        # No other process can open it by that name, and no other user through /proc.
        other = subprocess.run(["cat", handle.variables["MEGABATCH_STORE"]], capture_output=True)
        assert b"No such file" in other.stderr
        if os.geteuid() == 0:
            path = f"/proc/{os.getpid()}/fd/{handle.descriptors[0]}"
            other = subprocess.run(["cat", path], capture_output=True, user=NOBODY, group=NOBODY)
            assert b"Permission denied" in other.stderr
