"""A rank that fails on a GPU is named with its error, and all ranks end, although the backend detects nothing.

Launcher, ranks and training are real; the devices and their backend (`BLOCKING`) are stand-ins.
"""

import itertools
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megabatch_lab.rehearsal import backends, fake_cuda
from megabatch_lab.rehearsal.backends import BLOCKING

from megabatch.ranks.discover import RankInfo
from megabatch.ranks.failures import RankFailed
from megabatch.ranks.launch import Attempt
from megabatch.ranks.lifecycle import run_as_rank
from megabatch.ranks.signals import LAUNCHER, LauncherSignals
from megabatch.ranks.store import STORE_FILE
from tests.support import rehearsals
from tests.support.rank_pool import IMPORTED
from tests.support.rehearsals import tiny_for

NUM_RANKS, FAILING = 2, 1
STEP = 3  # in whose backward the all-reduce fails, from 0
ENDED_WITHIN_S = 60.0  # else they hang; NCCL would end them after 600 s
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def fail(*_: Any, **__: Any) -> None:
    raise ValueError("a drill")


def hang(*_: Any, **__: Any) -> torch.Tensor:
    """Take a second for the first batch, so that the other rank has waited longest, and hang in the second."""
    threading.Event().wait(1.0 if next(calls) == 0 else None)
    return torch.zeros((), dtype=torch.float64)


def kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


calls = itertools.count()


def share_gpu() -> None:
    torch.ops.rehearsal.set_devices(1)


def disturb(place: str, act: Callable[..., object]) -> None:
    """Make this rank fail or hang in one place."""
    from megabatch.comm.accelerator.streams import StreamReducer
    from megabatch.training import evaluate, prepare

    issue = StreamReducer.issue

    def issue_until(reducer: Any, work: Any) -> None:
        if work.header.step == STEP:
            act()
        issue(reducer, work)

    match place:
        case "load":
            prepare.load_data_set = act  # type: ignore[assignment]
        case "first backward":
            prepare.WarmUpPass.run = act  # type: ignore[assignment,method-assign]
        case "evaluation":
            evaluate.summed_loss = act  # type: ignore[assignment]
        case "all-reduce":
            StreamReducer.issue = issue_until  # type: ignore[assignment,method-assign]


def be_impatient() -> None:
    """Return from collectives at once, as NCCL does.  Later results are wrong, because the device computes at once."""
    backends.PATIENCE_S = 0.0


def be_impatient_in_evaluations() -> None:
    from megabatch.training import evaluate

    def batches(*args: Any) -> Any:
        be_impatient()
        return evaluation_batches(*args)

    evaluation_batches, evaluate.evaluation_batches = evaluate.evaluation_batches, batches  # type: ignore[assignment]


def be_rank(rank: int, folder: str, place: str, act: Callable[..., object], is_launched: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rehearsals.start()
    from megabatch.ranks import store, world
    from megabatch.training.run import run

    if is_launched:
        os.environ |= {LAUNCHER: str(os.getppid()), STORE_FILE: f"{folder}/store"}
    else:
        os.environ[ERROR_FILE] = f"{folder}/error-{rank}"
        store.open_any_store = lambda info: dist.FileStore(f"{folder}/store", -1)  # type: ignore[attr-defined]
    world.GRACE_S, world.LEFT_WITHIN_S = 0.5, 2.0
    world.BACKENDS["cuda"] = BLOCKING
    if place == "shared GPU":
        act()
    elif rank == FAILING:
        disturb(place, act)
    elif act is hang:
        be_impatient_in_evaluations()
    elif act is stop:
        disturb(place, be_impatient)
    settings = ["run.device=cuda", "comm.timeout_s=2", "train.evaluate_every=1"]
    config = tiny_for(NUM_RANKS, f"run.dir={folder}/run", *settings)
    run_as_rank(RankInfo(rank, NUM_RANKS, rank, NUM_RANKS), lambda store: run(config, "never", store))


class Started:
    """A forked rank, as the launcher sees a process."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self.process = context.Process(target=be_rank, args=arguments, daemon=True)
        self.process.start()
        self.pid, self.kill = self.process.pid, self.process.kill

    def poll(self) -> int | None:
        return self.process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode


def start(folder: Path, place: str, act: Callable[..., object], is_launched: bool) -> list[Started]:
    return [Started(rank, str(folder), place, act, is_launched) for rank in range(NUM_RANKS)]


def launch(folder: Path, place: str, act: Callable[..., object]) -> RankFailed | None:
    """Run two ranks below our launcher; return what it would print."""
    store = dist.FileStore(f"{folder}/store", -1)  # type: ignore[attr-defined]
    return Attempt(start(folder, place, act, True), store, LauncherSignals()).wait()  # type: ignore[arg-type]


def join(folder: Path, place: str, act: Callable[..., object]) -> list[tuple[int | None, str | None]]:
    """Run two ranks without a launcher; return the exit code and report of each, None if it hangs or reported none."""
    found = []
    for rank, started in enumerate(start(folder, place, act, False)):
        started.process.join(ENDED_WITHIN_S)
        report = folder / f"error-{rank}"
        found.append((started.poll(), json.loads(report.read_text())["message"] if report.exists() else None))
        started.kill()
    return found


DRILLS: dict[str, tuple[Callable[..., Any], str, Callable[..., object]]] = {
    "load": (launch, "load", fail),
    "first backward": (launch, "first backward", fail),
    "evaluation": (launch, "evaluation", fail),
    "all-reduce": (launch, "all-reduce", fail),
    "hang in evaluation": (launch, "evaluation", hang),
    "killed": (launch, "all-reduce", kill),
    "stopped": (launch, "all-reduce", stop),
    "shared GPU": (launch, "shared GPU", share_gpu),
    "unwatched": (join, "load", fail),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all drills at once: they mostly wait."""
    reason = fake_cuda.why_not()
    if reason:
        pytest.skip(reason)
    fake_cuda.build()
    with ThreadPoolExecutor(len(DRILLS)) as pool:
        running = {
            name: pool.submit(run, tmp_path_factory.mktemp("drill"), place, act)
            for name, (run, place, act) in DRILLS.items()
        }
        return {name: future.result() for name, future in running.items()}


@pytest.mark.parametrize("place", ["load", "first backward", "evaluation", "all-reduce"])
def test_the_launcher_names_a_rank_that_raises(results: dict[str, Any], place: str) -> None:
    failed = results[place]
    assert failed.rank == FAILING and str(failed).startswith("ValueError: ") and "a drill" in str(failed)


def test_the_launcher_names_a_rank_that_hangs_in_evaluation_and_not_one_that_waits(results: dict[str, Any]) -> None:
    failed = results["hang in evaluation"]
    assert failed.rank == FAILING and "Stuck: has been in evaluation of step 20" in str(failed)


def test_a_rank_that_is_killed_or_stopped_is_named(results: dict[str, Any]) -> None:
    killed, stopped = results["killed"], results["stopped"]
    assert killed.rank == FAILING and "was ended by SIGKILL" in str(killed)
    assert stopped.rank != FAILING and "rank 1 does not respond" in str(stopped)


def test_two_ranks_on_one_gpu_are_an_error_of_the_user(results: dict[str, Any]) -> None:
    failed = results["shared GPU"]
    assert failed.exit_code == 2 and "both use GPU 0 (fake); start one rank per GPU" in str(failed)


def test_ranks_leave_by_themselves_after_another_one_failed(results: dict[str, Any]) -> None:
    waiting, failed = results["unwatched"]
    assert failed[0] == 1 and failed[1].startswith("ValueError: a drill")
    assert waiting == (1, None)  # it leaves, and only the first to fail reports
