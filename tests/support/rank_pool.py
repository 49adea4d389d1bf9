"""One pool of started ranks for all tests of a pytest worker, because starting torch for every test is slow.

    results = ranks.run(function, argument, num_ranks=2)      # function(world, argument) of each rank

`starts` and `join` change how ranks start and join: rehearsals install a fake CUDA and another backend.
A rank that raises fails the test with its traceback.  Ranks that do not answer in time are named, print their stack
to stderr, and are replaced before the next test.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Imported once, in the process that ranks are forked from: torch, and its compiler, which the first DDP model imports,
# take 3.5 s of a core, and a pool of four ranks is restarted after every test that kills a rank.
IMPORTED = ["torch", "torch._dynamo", "megabatch.training.prepare"]
GRACE_S = 10.0  # time for the other ranks to notice a failure


Join = Callable[[int, int, str], AbstractContextManager[Any]]  # rank, num_ranks, store file -> World


class RanksFailed(AssertionError):
    pass


def join_by_file(device: str, rank: int, num_ranks: int, store: str) -> AbstractContextManager[Any]:
    import torch.distributed as dist

    from megabatch.ranks.discover import RankInfo
    from megabatch.ranks.store import RankStore
    from megabatch.ranks.world import connect

    info = RankInfo(rank, num_ranks, rank, num_ranks)
    return connect(info, device, RankStore(info, dist.FileStore(store, num_ranks)))


class RankPool:
    def __init__(self, size: int, device: str, starts: Callable[[], object] = int) -> None:
        self.size, self.device, self.starts = size, device, starts  # each rank calls `starts` once
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        num_ranks: int,
        timeout_s: float = 60.0,
        join: Join | None = None,
    ) -> list[Any]:
        assert num_ranks <= self.size, f"the pool has {self.size} ranks"
        join = join or partial(join_by_file, self.device)
        if not self.processes:
            self.start()
        with tempfile.TemporaryDirectory() as folder:
            try:
                for rank, pipe in enumerate(self.pipes[:num_ranks]):
                    with contextlib.suppress(BrokenPipeError):  # the rank exited; `collect` reports it
                        pipe.send((function, args, partial(join, rank, num_ranks, str(Path(folder) / "store"))))
                answers = self.collect(num_ranks, timeout_s)
            except BaseException:  # pytest's timeout or Ctrl-C: a later test must not read these answers
                self.close()
                raise
        failures = {rank: text for rank, (ok, text) in answers.items() if not ok}
        silent = [rank for rank in range(num_ranks) if rank not in answers]
        if silent:
            self.show_where_they_hang(silent)
        if silent or failures:
            self.close()
        if failures:
            raise RanksFailed("\n".join(f"rank {rank}:\n{text}" for rank, text in failures.items()))
        if silent:
            raise RanksFailed(f"{function.__name__}: no answer from ranks {silent} of {num_ranks} in {timeout_s:g} s")
        return [answers[rank][1] for rank in range(num_ranks)]

    def collect(self, num_ranks: int, timeout_s: float) -> dict[int, tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout_s
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes[:num_ranks])}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), timeout=left):
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[assignment,call-arg,union-attr]
                except (EOFError, ConnectionResetError):
                    answers[rank] = (False, "its process exited without a message")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, self.starts), name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        for pipe in self.pipes:
            pipe.recv()  # ready: importing torch does not count against a test's time

    def show_where_they_hang(self, ranks: list[int]) -> None:
        for rank in ranks:
            print(f"--- rank {rank} hangs here:", file=sys.stderr, flush=True)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.3)

    def close(self) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self.processes, self.pipes = [], []


def serve(pipe: Connection, starts: Callable[[], object]) -> None:
    """Run functions until the pipe closes: join the ranks of each function, call it, send its result."""
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch

    starts()
    pipe.send("ready")
    while True:
        try:
            function, args, join = pipe.recv()
        except EOFError:
            return
        torch.set_num_threads(1)  # undo the last function's setting
        try:
            with join() as world:
                answer = (True, function(world, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
