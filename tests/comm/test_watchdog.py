import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from megabatch.comm.cpu.barrier import MissingRank
from megabatch.comm.faults import failure, watchdog
from megabatch.comm.faults.failure import FailureReport, Stuck
from megabatch.comm.faults.progress import BackwardProgress
from megabatch.comm.faults.watchdog import Watchdog
from megabatch.comm.layouts import BucketLayouts
from megabatch.telemetry.activity import START_UP_TIMEOUT_S, Activity, LastWords


class Groups:
    """As a failure sees them."""

    def __init__(self) -> None:
        self.device, self.names, self.rank, self.has_aborted = "cpu", (4, 5), 0, False

    def abort(self) -> None:
        self.has_aborted = True

    def stopped_ranks(self) -> list[str]:
        return []


class Heard(LastWords):
    def __init__(self) -> None:
        super().__init__()
        self.logged, self.spoken = list[str](), threading.Event()

    def log(self, text: str) -> None:
        self.logged.append(text)

    def end(self, error: BaseException) -> None:
        self.error = error
        self.spoken.set()


def watch(activity: Activity, store: Any, words: LastWords) -> tuple[FailureReport, Groups]:
    layouts, groups = BucketLayouts(nn.Linear(2, 2)), Groups()
    groups.device = type("Device", (), {"type": "cpu"})()
    found = Watchdog(store, 0, (4, 5), activity, BackwardProgress(layouts), words)
    return FailureReport(groups, layouts, found), groups  # type: ignore[arg-type]


@pytest.fixture
def activity(monkeypatch: pytest.MonkeyPatch) -> Activity:
    monkeypatch.setattr(watchdog, "GRACE_S", 0.1)
    monkeypatch.setattr(failure, "LEFT_WITHIN_S", 0.3)
    activity = Activity(timeout_s=0.3)
    activity.step = 12
    return activity


def test_a_rank_that_is_stuck_is_interrupted_with_what_it_was_doing(activity: Activity) -> None:
    words, store = Heard(), dist.HashStore()  # type: ignore[attr-defined]
    with activity.interruptible():
        report, groups = watch(activity, store, words)
        activity.begin("data")
        time.sleep(0.5)  # in start-up that is no time
        activity.begin_steps()
        activity.begin("data")
        with pytest.raises(
            Stuck, match=r"is in data of step 12 on .* since \d\d:\d\d:\d\d \(.*test_watchdog.py:\d+ test_a_rank"
        ):
            threading.Event().wait(30)
        report.has_left.set()
    assert groups.has_aborted and not words.spoken.is_set()
    assert "threading.Event().wait(30)" in words.logged[0]
    assert "has aborted: is in data of step 12" in store.get("message/1").decode()


def test_one_that_waits_names_those_that_do_not_come(activity: Activity) -> None:
    """Nothing interrupts it, as nothing would in Gloo: so the watchdog speaks, and ends the process."""
    words, store = Heard(), dist.HashStore()  # type: ignore[attr-defined]
    activity.thread = 0
    activity.begin("evaluation", waits=True)
    activity.begin_steps()
    watch(activity, store, words)
    assert words.spoken.wait(30)
    assert isinstance(words.error, MissingRank)
    assert str(words.error).startswith(
        "other ranks did not come within 0.3 s to evaluation of step 12; rank 5 says nothing"
    )


def test_patience_follows_what_a_step_takes_and_starting_up_may_take_longer() -> None:
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
