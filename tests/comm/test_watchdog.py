import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megabatch.comm.api import distribute
from megabatch.comm.cpu.barrier import BarrierHeader, LateRank, MissingRank
from megabatch.comm.faults import failure, watchdog
from megabatch.comm.faults.failure import FailureHandler, Stuck
from megabatch.comm.faults.watchdog import BackwardProgress, Heartbeats, RankStates, Watchdog
from megabatch.comm.layouts import BucketLayouts
from megabatch.comm.settings import CommSettings
from megabatch.ranks import world as world_module
from megabatch.ranks.backends import BACKENDS
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.failures import PeerFailed
from megabatch.ranks.store import RankStore
from megabatch.ranks.world import World, connect, disconnect, leaving_with_others
from megabatch.telemetry.activity import START_UP_TIMEOUT_S, Activity, ExitReporter


class Groups:
    """The part of `comm.groups.Groups` that a failure report uses."""

    def __init__(self) -> None:
        self.device, self.names, self.rank, self.has_aborted = "cpu", (4, 5), 0, False

    def abort(self) -> None:
        self.has_aborted = True

    def stopped_ranks(self) -> list[str]:
        return []


class Recorder(ExitReporter):
    def __init__(self) -> None:
        super().__init__()
        self.logged, self.ended = list[str](), threading.Event()
        self.announced: BaseException | None = None

    def announce(self, error: BaseException) -> None:
        assert not self.logged  # nothing comes before the report
        self.announced = error

    def log(self, text: str) -> None:
        self.logged.append(text)

    def end_process(self, error: BaseException) -> None:
        self.error = error
        self.ended.set()


def watch(activity: Activity, store: Any, reporter: ExitReporter) -> tuple[FailureHandler, Groups]:
    layouts, groups = BucketLayouts(nn.Linear(2, 2)), Groups()
    groups.device = type("Device", (), {"type": "cpu"})()
    found = Watchdog(store, 0, (4, 5), activity, BackwardProgress(layouts), reporter)
    return FailureHandler(groups, layouts, found), groups  # type: ignore[arg-type]


@pytest.fixture
def activity(monkeypatch: pytest.MonkeyPatch) -> Activity:
    monkeypatch.setattr(watchdog, "GRACE_S", 0.1)
    monkeypatch.setattr(failure, "LEFT_WITHIN_S", 0.3)
    activity = Activity(timeout_s=0.3)
    activity.step = 12
    return activity


def test_stuck_rank_is_interrupted_and_reports_its_activity(activity: Activity) -> None:
    reporter, store = Recorder(), dist.HashStore()  # type: ignore[attr-defined]
    with activity.interruptible():
        report, groups = watch(activity, store, reporter)
        activity.begin("data")
        time.sleep(0.5)  # shorter than the timeout of start-up
        activity.begin_steps()
        activity.begin("data")
        with pytest.raises(
            Stuck,
            match=r"data of step 12 .*\d\d:\d\d:\d\d \(.*test_watchdog.py:\d+ test_stuck_rank",
        ):
            threading.Event().wait(30)
        report.has_left.set()
    assert groups.has_aborted and not reporter.ended.is_set() and isinstance(reporter.announced, Stuck)
    assert "threading.Event().wait(30)" in reporter.logged[0]
    assert "has aborted: has been in data of step 12" in store.get("message/1").decode()


def test_waiting_rank_names_the_missing_ranks(activity: Activity) -> None:
    """A call in Gloo cannot be interrupted, so the watchdog reports the error and ends the process."""
    reporter, store = Recorder(), dist.HashStore()  # type: ignore[attr-defined]
    activity.thread = 0
    activity.begin("evaluation", waits=True)
    activity.begin_steps()
    watch(activity, store, reporter)
    assert reporter.ended.wait(30)
    assert isinstance(reporter.error, MissingRank)
    assert str(reporter.error).startswith(
        "other ranks did not arrive within 0.3 s at evaluation of step 12; rank 5 does not respond"
    )


@pytest.mark.parametrize(
    ("error", "quoted"),
    [(LateRank("rank 5 did not arrive within 3 s"), True), (MissingRank("rank 5 has died"), False)],
)
def test_report_of_a_late_rank_is_awaited(
    monkeypatch: pytest.MonkeyPatch, activity: Activity, error: MissingRank, quoted: bool
) -> None:
    """The watchdog of a late rank may report after the others have lost patience, if the machine is busy."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    report, _ = watch(activity, store, Recorder())
    late = RankStates(store, 1, (4, 5), timeout_s=0.3)
    monkeypatch.setattr(RankStates, "listen", lambda states, is_enough: late.write("has been in data"))
    report.record(error, BarrierHeader(step=12), "node")
    assert type(report.error) is MissingRank and str(error) in str(report.error)
    assert str(report.error).endswith("; rank 5 has been in data") is quoted


class CountedStore:
    """A store in memory that counts the values that are written."""

    def __init__(self) -> None:
        self.values, self.num_written = dict[str, bytes](), 0

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()
        self.num_written += 1

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def test_ranks_answer_only_if_asked_and_a_silent_one_is_noticed() -> None:
    store = CountedStore()
    first, second = (Heartbeats(store, rank, 2) for rank in range(2))
    first.start()
    assert first.silent_s(0.0) == first.silent_s(50.0) == 0.0  # the second has not started
    second.start()
    for _ in range(10):
        first.answer()
        second.answer()
    assert store.num_written == 2  # without a wait nothing is written
    for now_s in (100.0, 102.0, 104.0):
        assert first.silent_s(now_s) == 0.0
        second.answer()
    assert first.silent_s(1000.0) == 0.0  # the time between two waits does not count
    assert first.silent_s(1015.0) == 15.0 and first.silent_s(1017.0) == 17.0
    second.answer()
    assert first.silent_s(1018.0) == 0.0


@pytest.mark.parametrize(("stopped_s", "is_stuck"), [(6.5, False), (100.0, False), (0.0, True)])
def test_a_process_that_was_stopped_is_not_stuck(stopped_s: float, is_stuck: bool) -> None:
    """Stop it as `scontrol suspend` does.  Without a pause between looks, the rank has spent the time in forward."""
    activity, stuck = Activity(timeout_s=6.0), list[float]()
    activity.begin("forward")
    activity.begin_steps()
    layouts = BucketLayouts(nn.Linear(2, 2))
    found = Watchdog(dist.HashStore(), 0, (0, 1), activity, BackwardProgress(layouts), Recorder())  # type: ignore[attr-defined]
    found.close()
    found.on_stuck = lambda waits, patience_s: stuck.append(patience_s)
    activity.changed_s -= 6.5 if is_stuck else stopped_s
    found.looked_s = time.perf_counter() - stopped_s
    found.look()
    assert stuck == [6.0] * is_stuck


def test_timeout_follows_the_longest_activity_and_is_longer_at_start_up() -> None:
    activity = Activity(timeout_s=0.01)
    assert activity.patience_s == START_UP_TIMEOUT_S and not activity.steps_run
    activity.begin_steps()
    assert activity.patience_s == 0.01
    activity.begin("data")
    time.sleep(0.02)
    activity.begin("forward")
    assert activity.patience_s >= 0.06
    activity.end_steps()
    assert activity.patience_s == START_UP_TIMEOUT_S
    assert Activity(7.0, is_followed=False).patience_s == 7.0


def test_a_generator_that_is_closed_early_is_not_a_failure() -> None:
    """The benches and the self-test stop after some steps; nothing of a healthy run is aborted."""
    reported = list[str]()

    def steps(world: World) -> Iterator[None]:
        with distribute(nn.Linear(2, 2), world, CommSettings())[1] as gradients:
            gradients.failure.watchdog.report_final = reported.append  # type: ignore[assignment,method-assign]
            yield

    with connect(RankInfo(0, 1, 0, 1), "cpu") as world:
        running = steps(world)
        next(running)
        running.close()
    assert not reported


def cuda_world(monkeypatch: pytest.MonkeyPatch, abort: Callable[[], object]) -> tuple[World, Recorder]:
    """A rank on an accelerator with a short patience.  It uses no device."""
    monkeypatch.setattr(world_module, "abort_process_groups", abort)
    monkeypatch.setattr(world_module, "GRACE_S", 0.05)
    monkeypatch.setattr(world_module, "LEFT_WITHIN_S", 0.2)
    monkeypatch.setattr(world_module, "POLL_S", 0.02)
    reporter = Recorder()
    world = World(0, 2, torch.device("cuda", 0), BACKENDS["cuda"], exit_reporter=reporter)
    world.owns_process_group = True
    return world, reporter


def test_process_ends_although_abort_never_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    world, reporter = cuda_world(monkeypatch, lambda: threading.Event().wait() and None)
    left = list[BaseException]()
    world.leaving.append(left.append)
    with pytest.raises(ValueError), world.announcing():
        raise ValueError("out of memory")
    assert isinstance(reporter.announced, ValueError) and left == [reporter.announced]
    assert reporter.ended.wait(30) and reporter.error is reporter.announced


def test_error_reaches_the_script_if_abort_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    world, reporter = cuda_world(monkeypatch, lambda: None)
    with pytest.raises(ValueError), world.announcing():
        raise ValueError("out of memory")
    disconnect(world)
    assert not reporter.ended.wait(0.5)


def test_rank_that_waits_leaves_when_another_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    world, reporter = cuda_world(monkeypatch, lambda: None)
    shared = dist.HashStore()  # type: ignore[attr-defined]
    own, other = (RankStore(RankInfo(rank, 2, rank, 2), shared) for rank in range(2))
    with world.activity.interruptible(), leaving_with_others(world, own):
        other.register(ValueError("out of memory"))
        with pytest.raises(PeerFailed, match="another rank failed"):
            threading.Event().wait(30)
        world.has_left.set()
    assert not reporter.ended.is_set()
