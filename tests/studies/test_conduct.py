"""A study without its runs: what is trained, in which order, and what becomes of the results."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from megabatch.runs.records import EvaluationRecord, Summary
from megabatch.runs.totals import RunTotals
from megabatch.studies.conduct import SEARCH_SEED, conduct
from megabatch.studies.design import ArmDesign, Design
from megabatch.studies.evidence import Curve
from megabatch.sweep.trials import Trial
from tests.support.records import step_record

DESIGN = Design(
    name="tiny",
    title="Tiny",
    question="?",
    setup="none",
    recipe="smoke",
    overrides=("train.epochs=3",),
    arms=(
        ArmDesign(name="small, 1", about="baseline", overrides=("batch.global=8",), grid=(1, 4, 16)),
        ArmDesign(
            name="scaled",
            about="10 times",
            overrides=("batch.global=80",),
            learning_rate_of="small, 1",
            learning_rate_times=10,
        ),
        ArmDesign(name="wild", about="diverges from 4 on", overrides=("batch.global=88",), grid=(1, 4, 16)),
    ),
    baseline="small, 1",
    validation=0.25,
    trials=5,
    seeds=2,
    layer="pool5",
)
BEST_RATE = 2.0


class FakeRuns:
    """Accuracy falls with the distance from the best rate; `wild` diverges from 4 on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls, self.wild_from = folder, list[list[Trial]](), 4.0

    def __call__(self, trials: Sequence[Trial]) -> list[Summary]:
        self.calls.append(list(trials))
        return [self.summary(trial) for trial in trials]

    def summary(self, trial: Trial) -> Summary:
        settings = dict(override.split("=", 1) for override in trial.overrides)
        rate, seed = float(settings["optim.learning_rate"]), int(settings["seed"])
        distance = max(rate, BEST_RATE) / min(rate, BEST_RATE)
        top1 = 0.9 - 0.01 * distance + 0.001 * (seed % 10)
        record = EvaluationRecord(
            step=3, epoch=3.0, top1=top1, top5=1.0, test_loss=0.3, class_top1=[], samples_evaluated=10
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


def follow(folder: Path, layer: str) -> Curve:
    return [(1.0, 0.5)] if (folder / "metrics.jsonl").exists() and layer == "pool5" else []


@pytest.fixture
def runs(tmp_path: Path) -> FakeRuns:
    return FakeRuns(tmp_path)


def test_rates_are_searched_on_held_out_images_and_seeds_trained_on_all(runs: FakeRuns) -> None:
    conduct(DESIGN, runs.folder, "megabatch study tiny", runs, follow)
    for trial in runs.trials:
        settings = dict(override.split("=", 1) for override in trial.overrides)
        if trial.name.startswith("search-"):
            assert settings["data.validation"] == "0.25" and settings["seed"] == str(SEARCH_SEED)
        else:
            assert "data.validation" not in settings and settings["seed"] in ("1", "2")
            assert settings["train.evaluate_every"] == "0"  # the test images are looked at once
        assert settings["train.epochs"] == "3"
    names = [trial.name for trial in runs.trials]
    assert len(set(names)) == len(names) == DESIGN.num_trials == 2 * 5 + 3 * 2
    assert {name.partition("-")[0] for name in names[:-6]} == {"search"}


def test_every_search_has_the_same_budget_and_rounds_fill_the_queue_together(runs: FakeRuns) -> None:
    study = conduct(DESIGN, runs.folder, "megabatch study tiny", runs, follow)
    assert [len(arm.tuned) for arm in study.arms] == [5, 0, 5]
    first, *_, last = runs.calls
    assert len(first) == 6 and len(last) == 6


def test_the_best_rate_is_trained_with_and_others_follow_it(runs: FakeRuns) -> None:
    study = conduct(DESIGN, runs.folder, "megabatch study tiny", runs, follow)
    small, scaled, wild = study.arms
    assert small.learning_rate == 2 and scaled.learning_rate == 20
    assert wild.learning_rate == 1 and [rate for rate, top1 in wild.tuned if top1 is None] == [4, 16]
    assert [run.top1 for run in small.runs] == pytest.approx([0.891, 0.892])
    assert small.settings == ["batch.global=8"]
    assert small.runs[0].curves == {
        "training loss": [(1.0, 2.5), (2.0, 1.0)],
        "variance of pool5's output": [(1.0, 0.5)],
    }
    assert study.took_s == 2.0 * DESIGN.num_trials
    assert study.versions == {"megabatch": "0.1", "torch": "2.1 and 2.2", "python": "3.11"}


def test_an_arm_that_diverges_at_every_rate_is_not_trained_further(runs: FakeRuns) -> None:
    runs.wild_from = 0.0
    study = conduct(DESIGN, runs.folder, "megabatch study tiny", runs, follow)
    *_, wild = study.arms
    assert wild.learning_rate is None and wild.runs == [] and {top1 for _, top1 in wild.tuned} == {None}
    assert len(runs.calls[-1]) == 4
