"""The order of trials in a study and the use of their results, with simulated runs."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from megabatch.errors import UserError
from megabatch.experiments.conduct import Conductor, Probes
from megabatch.experiments.design import ArmDesign, Design, SearchDesign
from megabatch.experiments.evidence import Criterion, Curve, Study
from megabatch.experiments.page import page
from megabatch.experiments.plan import SEARCH_SEED
from megabatch.experiments.trials import Trial
from megabatch.runs.records import EvaluationRecord, StepTimes, Summary
from megabatch.runs.totals import RunTotals
from tests.support.records import step_record

DESIGN = Design(
    name="tiny",
    title="Tiny",
    question="?",
    setup="none",
    recipe="smoke",
    settings=("train.epochs=3", "batch.micro=8"),
    arms=(
        ArmDesign(name="small, 1", about="baseline", settings=("batch.global=8",), learning_rates=(1, 4, 16)),
        ArmDesign(
            name="scaled",
            about="10 times",
            settings=("batch.global=80",),
            learning_rate_of="small, 1",
            learning_rate_times=10,
        ),
        ArmDesign(name="wild", about="diverges from 4 on", settings=("batch.global=88",), learning_rates=(1, 4, 16)),
        ArmDesign(name="given", settings=("batch.global=96",), learning_rate=3.0, seeds=1),
    ),
    baseline="small, 1",
    search=SearchDesign(trials=5, held_out=0.25),
    seeds=2,
    curves={"variance": "tests.studies.test_conduct:follow"},
)
BEST_RATE = 2.0


class FakeRuns:
    """Runs whose accuracy falls with the distance from the best rate; `wild` diverges from a rate of 4."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls, self.wild_from = folder, list[list[Trial]](), 4.0

    def __call__(self, trials: Sequence[Trial], on_end: Callable[[Trial, Summary], None]) -> None:
        self.calls.append(list(trials))
        for trial in trials:
            on_end(trial, self.summary(trial))

    def summary(self, trial: Trial) -> Summary:
        settings = dict(override.split("=", 1) for override in trial.overrides)
        rate, seed = float(settings["optim.learning_rate"]), int(settings["seed"])
        distance = max(rate, BEST_RATE) / min(rate, BEST_RATE)
        top1 = 0.9 - 0.01 * distance + 0.001 * (seed % 10)
        record = EvaluationRecord(
            step=3,
            epoch=3.0,
            top1=top1,
            top5=1.0,
            test_loss=0.3,
            class_top1=[],
            samples_evaluated=10,
            wall_s=2.0,
            times=StepTimes(),
        )
        steps = [step_record(1, 0.7, 3.0), step_record(2, 1.0, 2.0), step_record(3, 1.3, 1.0), record]
        (self.folder / trial.name).mkdir()
        (self.folder / trial.name / "metrics.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(steps))
        versions = {"megabatch": "0.1", "torch": f"2.{seed}", "python": "3.11"}
        (self.folder / trial.name / "env.json").write_bytes(msgspec.json.encode(versions))
        totals = RunTotals(global_batch=8, target_top1=None, evaluation=record, wall_s=2.0)
        return totals.summary("diverged" if settings["batch.global"] == "88" and rate >= self.wild_from else "finished")

    @property
    def trials(self) -> list[Trial]:
        return [trial for call in self.calls for trial in call]


def follow(folder: Path) -> Curve:
    return [(1.0, 0.5)] if (folder / "metrics.jsonl").exists() else []


@pytest.fixture
def runs(tmp_path: Path) -> FakeRuns:
    return FakeRuns(tmp_path)


def conduct(
    runs: FakeRuns,
    design: Design = DESIGN,
    write: Callable[[Study], object] = lambda study: None,
    before: Study | None = None,
) -> Study:
    probes: Probes = {"variance": follow}
    return Conductor(design, runs.folder, "megabatch study tiny", runs, probes, write, before, "tiny.json").conduct()


def test_rates_are_searched_on_held_out_images_and_seeds_trained_on_all(runs: FakeRuns) -> None:
    conduct(runs)
    for trial in runs.trials:
        settings = dict(override.split("=", 1) for override in trial.overrides)
        if trial.name.startswith("search-"):
            assert settings["data.validation"] == "0.25" and settings["seed"] == str(SEARCH_SEED)
        else:
            assert "data.validation" not in settings and settings["seed"] in ("1", "2")
            assert settings["train.evaluate_every"] == "0"  # the test images are used once
        assert settings["train.epochs"] == "3"
    names = [trial.name for trial in runs.trials]
    assert len(set(names)) == len(names) == DESIGN.num_trials == 2 * 5 + 3 * 2 + 1
    assert {name.partition("-")[0] for name in names[:-7]} == {"search"}


def test_every_search_has_the_same_budget_and_rounds_fill_the_queue_together(runs: FakeRuns) -> None:
    study = conduct(runs)
    assert [len(arm.tuned) for arm in study.arms] == [5, 0, 5, 0]
    first, *_, last = runs.calls
    assert len(first) == 6 and len(last) == 7


def test_final_runs_use_the_best_rate_and_derived_arms_follow(runs: FakeRuns) -> None:
    study = conduct(runs)
    small, scaled, wild, given = study.arms
    assert small.learning_rate == 2 and scaled.learning_rate == 20 and given.learning_rate == 3
    assert wild.learning_rate == 1 and [run.learning_rate for run in wild.tuned if run.top1 is None] == [4, 16]
    assert [run.top1 for run in small.runs] == pytest.approx([0.891, 0.892]) and len(given.runs) == 1
    assert small.settings == ["batch.global=8"]
    assert small.runs[0].curves == {"training loss": [(1.0, 2.5), (2.0, 1.0)], "variance": [(1.0, 0.5)]}
    assert study.took_s == 2.0 * DESIGN.num_trials
    assert study.versions == {"megabatch": "0.1", "torch": "2.1 and 2.1000 and 2.2", "python": "3.11"}


def test_an_arm_that_diverges_at_every_rate_is_not_trained_further(runs: FakeRuns) -> None:
    runs.wild_from = 0.0
    study = conduct(runs)
    wild = study.arm("wild")
    assert wild.learning_rate is None and wild.runs == [] and {run.top1 for run in wild.tuned} == {None}
    assert len(runs.calls[-1]) == 5
    assert study.num_runs == study.num_planned == DESIGN.num_trials - 2  # no run is pending


def test_arms_of_a_criterion_are_searched_and_run_before_the_others(runs: FakeRuns) -> None:
    criterion = Criterion(arm="scaled", baseline="small, 1", max_gap_points=0.3)
    conduct(runs, msgspec.structs.replace(DESIGN, criteria=(criterion,)))
    names = [trial.name for trial in runs.trials]
    assert all("small-1" in name or "scaled" in name for name in names[:9])
    assert not any("small-1" in name or "scaled" in name for name in names[9:])


def test_later_start_runs_only_missing_trials_with_the_same_result(runs: FakeRuns, tmp_path: Path) -> None:
    """Restart after every run with only the written results, as on another machine."""
    written: list[Study] = []
    whole = conduct(runs, write=written.append)
    assert [study.num_runs for study in written] == [*range(1, 18)]
    assert all(study.num_planned == 17 for study in written)
    for number in (1, 4, 11, 16):
        (tmp_path / f"again-{number}").mkdir()
        again = FakeRuns(tmp_path / f"again-{number}")
        stored = msgspec.json.decode(msgspec.json.encode(written[number - 1]), type=Study)
        study = conduct(again, before=stored)
        assert len(again.trials) == 17 - number
        assert (study.arms, study.took_s, study.versions) == (whole.arms, whole.took_s, whole.versions)


def test_page_of_an_incomplete_study_judges_nothing(runs: FakeRuns) -> None:
    written: list[Study] = []
    criterion = Criterion(arm="scaled", baseline="small, 1", max_gap_points=50.0)
    design = msgspec.structs.replace(DESIGN, criteria=(criterion,))
    conduct(runs, design, written.append)
    pages = [page(study, []) for study in written]
    assert "**1 of 17 runs are complete.**" in pages[0] and "search in progress" in pages[0]
    assert "not judged until all seeds are complete (scaled: 1 of 2; small, 1: 2 of 2)" in pages[7]
    assert not any(": holds" in text for text in pages[:8])
    assert all(": holds" in text for text in pages[8:])
    assert "runs are complete.**" not in pages[-1]


def test_results_of_other_settings_are_neither_used_nor_lost(runs: FakeRuns) -> None:
    whole = conduct(runs)
    fewer = msgspec.structs.replace(DESIGN, seeds=1)
    longer = msgspec.structs.replace(DESIGN, settings=("train.epochs=4", "batch.micro=8"))
    without = msgspec.structs.replace(DESIGN, arms=DESIGN.arms[:3])
    for design, reason in (
        (fewer, "tiny.json has run 'seed-2-small-1' with settings that differ"),
        (longer, "tiny.json has run 'search-small-1-0.25' with settings that differ"),
        (without, "tiny.json has runs of arm 'given', which is not in the study"),
    ):
        with pytest.raises(UserError, match=reason):
            conduct(runs, design, before=whole)
