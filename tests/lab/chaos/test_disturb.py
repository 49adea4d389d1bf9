"""Runs of a fake trainer under faults: correct runs pass, and chaos finds every flaw."""

import sys
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from megabatch_lab.chaos import judge
from megabatch_lab.chaos.disturb import Disturbance, check_end
from megabatch_lab.chaos.faults import Fault, Kind, Trigger
from megabatch_lab.chaos.judge import Watch
from megabatch_lab.chaos.launcher import Launcher
from megabatch_lab.chaos.report import DisturbedRun
from megabatch_lab.chaos.site import Site

from megabatch.runs.totals import RunTotals
from tests.support.processes import wait_until
from tests.support.records import step_record

NUM_STEPS = 40
Place = Literal["start-up", "step", "write"]  # the place at which the trainer waits for a fault
TRAINER = Path(__file__).parents[2] / "support" / "pretended_training.py"


UNEXPLAINED = "trainer ended with exit code 1 without a fault after its restart"


def make_site(
    folder: Path, mark: str, max_restarts: int = 0, flaw: str = "", num_faults: int = 0, place: Place = "step"
) -> Site:
    folder.mkdir()
    summary = RunTotals(global_batch=1, target_top1=None).summary("finished")
    (folder / "summary").write_bytes(msgspec.json.encode(summary))
    (folder / "row").write_bytes(msgspec.json.encode(step_record(1, 1.0, 0.0)))
    words = map(str, (TRAINER, folder, NUM_STEPS, max_restarts, flaw, num_faults, place))
    command = [sys.executable, "-I", "-S", *words]
    return Site([Launcher("trainer", command, mark, folder / "launcher")], folder / "run", max_restarts)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Disturbance:
    folder = tmp_path_factory.mktemp("chaos") / "undisturbed"
    found = Disturbance(make_site(folder, str(folder)), DisturbedRun(number=0, max_restarts=0))
    found.run()
    assert not found.outcome.problems and found.timed().num_steps == NUM_STEPS
    return found


def disturb(
    undisturbed: Disturbance,
    folder: Path,
    kinds: list[Kind],
    max_restarts: int = 0,
    flaw: str = "",
    place: Place = "step",
) -> DisturbedRun:
    """Run with a fault every few steps, or one at another place: rank 1 is killed, rank 0 is stopped."""
    outcome = DisturbedRun(number=1, max_restarts=max_restarts)
    site = make_site(folder / "disturbed", str(folder), max_restarts, flaw, len(kinds), place)
    # A checkpoint that is written in place cannot be detected, so this fault comes after the row of step 10.
    at_write, first = place == "write" and flaw != "tears checkpoints", 10 if place == "write" else 8
    faults = [
        (
            Fault(kind=kind, share=0.0, at_write=at_write, victim=0.9 * (kind != "stop"), hold=0.0),
            Trigger(0.0 if place == "start-up" else None, first + 10 * i),
        )
        for i, kind in enumerate(kinds)
    ]
    disturbance = Disturbance(
        site, outcome, faults, undisturbed.timed(), timeout_s=0.5, patience_s=1.5 if flaw == "hangs" else 30.0
    )
    disturbance.run()
    if not disturbance.is_abandoned:
        check_end(outcome, undisturbed.site.run, site.run)
    assert not site.launchers[0].processes()
    return outcome


def test_resumed_run_is_bitwise_identical_and_faults_are_timed(undisturbed: Disturbance, tmp_path: Path) -> None:
    found = disturb(undisturbed, tmp_path, ["rank", "launcher", "term"])
    assert found.problems == []
    assert [fault.kind for fault in found.faults] == ["rank", "launcher", "term"] and found.num_starts == 4
    for fault in found.faults:
        assert fault.noticed_s is not None and fault.resumed_s is not None and fault.noticed_s <= fault.resumed_s
        assert fault.phase == "step" and fault.repeated == 3 and fault.restarted
    assert found.faults[0].message == "megabatch: rank 1: was ended by SIGKILL"


@pytest.mark.parametrize("kind", ["rank", "launcher"])
def test_kill_during_a_checkpoint_leaves_the_previous_one(undisturbed: Disturbance, tmp_path: Path, kind: Kind) -> None:
    found = disturb(undisturbed, tmp_path, [kind], place="write")
    assert found.problems == [] and found.num_starts == 2
    assert [(fault.phase, fault.repeated) for fault in found.faults] == [("write", 5)]


@pytest.mark.parametrize("kind", ["rank", "term"])
def test_late_fault_ends_only_after_a_restart(
    undisturbed: Disturbance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """The fault is decided in start-up, but the run takes steps before it comes.  These do not count as a recovery."""

    def strike_late(site: Site, fault: Fault, ranks: dict[int, int]) -> str | None:
        (site.run.parent / "released").touch()
        wait_until(lambda: Watch(site.run).look().is_at_work)
        return strike(site, fault, ranks)

    strike = Site.strike
    monkeypatch.setattr(Site, "strike", strike_late)
    found = disturb(undisturbed, tmp_path, [kind], place="start-up")
    assert found.problems == [] and found.num_starts == 2
    assert [(fault.phase, fault.restarted) for fault in found.faults] == [("start-up", True)]


class LateDisturbance(Disturbance):
    """A disturbance whose run ends between two polls, the first of which still finds ranks."""

    def follow_fault(self) -> None:
        if self.first_ranks_s:
            wait_until(lambda: self.site.launchers[0].exit_code is not None)


def test_last_rows_are_read_after_the_run_has_ended(tmp_path: Path) -> None:
    found = LateDisturbance(make_site(tmp_path / "site", str(tmp_path)), DisturbedRun(number=0, max_restarts=0))
    found.run()
    assert not found.outcome.problems and found.timed().num_steps == NUM_STEPS


def test_fault_on_ended_ranks_has_no_victim(tmp_path: Path) -> None:
    fault = Fault(kind="rank", share=0.0, at_write=False, victim=0.9, hold=0.0)
    assert make_site(tmp_path / "site", str(tmp_path)).strike(fault, {}) is None


def test_launcher_with_max_restarts_is_not_started_again(undisturbed: Disturbance, tmp_path: Path) -> None:
    found = disturb(undisturbed, tmp_path, ["rank", "stop"], max_restarts=2)
    assert found.problems == [] and found.num_starts == 1
    assert [fault.restarted for fault in found.faults] == [False, False]


@pytest.mark.parametrize(
    ("flaw", "kind", "message"),
    [
        ("drifts", "launcher", "model.safetensors: 1 of 1 tensors differ, first w"),
        ("repeats rows", "launcher", "metrics.jsonl, row "),
        ("orphans", "launcher", "(rank 1) remains"),
        ("litters", "rank", "/tmp/litter remains"),
        ("prints no message", "rank", "rank of rank 1 ended the run without a message, with exit code 1"),
        ("hangs", "stop", "no progress for 2 s after stop of rank 0 in phase step"),
        ("fails later", "rank", f"{UNEXPLAINED}: megabatch: rank 0: ended with exit code 1"),
        ("tears checkpoints", "launcher", f"{UNEXPLAINED}: megabatch: rank 0: ended with exit code 1"),
    ],
)
def test_every_flaw_is_found(
    undisturbed: Disturbance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flaw: str, kind: Kind, message: str
) -> None:
    monkeypatch.setattr(judge, "LINGER_S", 0.3 if flaw == "orphans" else 5.0)
    found = disturb(undisturbed, tmp_path, [kind], flaw=flaw, place="write" if flaw == "tears checkpoints" else "step")
    assert any(message in problem for problem in found.problems), found.problems
