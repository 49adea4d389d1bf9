import json
from collections.abc import Callable
from pathlib import Path

import pytest
from megabatch_lab.bench import simulated_hosts
from megabatch_lab.bench.hosts import Ranks
from megabatch_lab.bench.simulated_hosts import (
    ALL_REDUCES,
    BASE,
    BASE_MODEL,
    BASE_STEPS,
    TRAININGS,
    MeasuredStep,
    Row,
    by_kind,
    distinct,
    even_cores,
    fit_steps,
    fused_to,
    line,
    score,
    score_line,
    topology_of,
)
from megabatch_lab.bench.simulated_ranks import AllReduces, Measured, Steps, Task
from msgspec.structs import replace

from megabatch.planning.topology import ClusterShape
from megabatch.simulate.cores import StepTime
from tests.support.simulated import COSTS, made_up_profile

ROW = Row(
    kind="all-reduce",
    ranks="2+2",
    gbps=1.0,
    model="resnet50",
    comm_dtype="same",
    algorithm="flat",
    predicted_s=1.0,
    measured_s=1.0,
)


def rows(*times_s: tuple[float, float]) -> list[Row]:
    """Return rows of one task by several algorithms, with their predicted and measured seconds."""
    return [
        replace(ROW, algorithm=str(place), predicted_s=predicted_s, measured_s=measured_s)
        for place, (predicted_s, measured_s) in enumerate(times_s)
    ]


def test_error_is_relative_to_the_measured_time_and_scored_by_its_size() -> None:
    found = score(rows((1.1, 1.0), (1.6, 2.0), (3.0, 3.0)))
    assert [round(row.error, 9) for row in rows((1.1, 1.0), (1.6, 2.0))] == [0.1, -0.2]
    assert (found.median_error, found.worst_error) == pytest.approx((0.1, 0.2))


def test_order_of_algorithms_is_scored_only_if_times_differ_by_a_tenth() -> None:
    assert score(rows((1.0, 1.0), (2.0, 1.05)))[2:] == (0, 0)
    assert score(rows((1.0, 1.0), (1.01, 1.2)))[2:] == (1, 1)
    assert score(rows((1.01, 1.0), (1.0, 1.2)))[2:] == (0, 1)
    assert score(rows((1.0, 1.0), (2.0, 2.0), (1.5, 3.0)))[2:] == (2, 3)
    assert score(rows((1.0, 1.0), (1.0, 2.0)))[2:] == score(rows((1.0, 2.0), (1.0, 1.0)))[2:] == (0, 1), "a tie"


@pytest.mark.parametrize(
    "change",
    [
        lambda row: replace(row, ranks="3+1"),
        lambda row: replace(row, gbps=5.0),
        lambda row: replace(row, model="alexnet"),
        lambda row: replace(row, comm_dtype="bf16"),
        lambda row: replace(row, kind="step"),
    ],
)
def test_order_is_scored_only_for_the_same_task(change: Callable[[Row], Row]) -> None:
    one, other = rows((1.0, 1.0), (0.5, 2.0))
    assert score([one, other]).num_pairs == 1
    assert score([one, change(other)]).num_pairs == 0


def test_rows_are_scored_in_total_and_by_kind() -> None:
    mixed = [*rows((1.1, 1.0)), replace(ROW, kind="step", predicted_s=1.5)]
    assert {name: len(of_kind) for name, of_kind in by_kind(mixed).items()} == {"all-reduce": 1, "step": 1, "all": 2}
    assert score_line("all", score(mixed))["worst"] == "50.0%"
    assert line(mixed[1])["error"] == "+50.0%"


def test_predicted_cases_are_not_fitted() -> None:
    base = {*BASE, *((case.ranks, case.gbps) for case in BASE_STEPS)}
    assert all(len(ranks) == 2 for ranks, _ in base)
    cases = [*ALL_REDUCES, *TRAININGS]
    assert not base & {(case.ranks, case.gbps) for case in cases}
    assert {len(case.ranks) for case in cases} == {2, 3, 4}
    assert {0.5, 5.0} <= {case.gbps for case in cases}
    assert {case.model for case in cases} > {BASE_MODEL}
    assert any(len(set(case.ranks)) > 1 for case in cases)


def test_unhidden_time_of_steps_is_a_share_of_the_shorter_of_network_and_cores() -> None:
    steps = [MeasuredStep(StepTime(2.0, 1.0), 2.2), MeasuredStep(StepTime(1.0, 3.0), 3.4)]
    assert fit_steps(steps, COSTS).step_unhidden == pytest.approx(0.3)
    assert fit_steps([MeasuredStep(StepTime(2.0, 1.0), 1.5)], COSTS).step_unhidden == 0.0


def test_ranks_are_numbered_host_by_host() -> None:
    assert topology_of((3, 1, 2)).nodes == ((0, 1, 2), (3,), (4, 5))


def test_ranks_wait_for_the_core_with_the_most_ranks() -> None:
    one_each, unequal, two_each = (ClusterShape(sizes) for sizes in (((1, 3),), ((1, 1), (2, 1)), ((2, 2),)))
    assert even_cores(one_each, 2) == 1.0, "the first ranks of three hosts share the first core"
    assert even_cores(unequal, 2) == 1.5
    assert even_cores(two_each, 2) == 2.0


def test_gradients_are_fused_into_one_bucket_or_kept_separate() -> None:
    topology, sizes = topology_of((2, 2)), [1 << 20, 1 << 10, 1 << 18]
    whole = fused_to(1e3, sizes, "torus", "bf16", topology)
    assert [bucket.num_elements for bucket in whole.buckets] == [sum(sizes)]
    assert [bucket.num_elements for bucket in fused_to(0.0, sizes, "flat", "same", topology).buckets] == sizes


def test_hierarchical_is_left_out_with_one_rank_per_host() -> None:
    assert distinct(ClusterShape.regular(3, 1), "bf16") == ["flat", "torus"]
    assert distinct(ClusterShape.regular(3, 2), "bf16") == ["flat", "hierarchical", "torus"]
    assert distinct(ClusterShape(((1, 1), (2, 1))), "bf16") == ["flat", "hierarchical"]


def test_every_case_is_predicted_measured_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    profile = made_up_profile("alexnet_bn", 64, 10, (4, 8), (0.0125, 0.025, 0.025), 1 << 20, 0.1)

    def made_up(ranks: Ranks, gbps: float, task: Task) -> tuple[Measured, float]:
        match task:
            case AllReduces():
                return Measured({arm.name: 1.0 for arm in task.arms}), 0.95
            case Steps():
                return Measured({task.dtype: 1.0}), 0.95
        return Measured(memory_step_s=1e-5, profile=profile), 1.0

    monkeypatch.setattr(simulated_hosts, "measure", made_up)
    monkeypatch.setattr(simulated_hosts, "require_tools", lambda: None)
    monkeypatch.setattr(simulated_hosts, "measure_exchange_gaps", lambda: 0.5)
    monkeypatch.setattr(simulated_hosts, "gradient_sizes", lambda model: [1 << 22, 1 << 20, 1 << 10])
    found = simulated_hosts.run_here(1, tmp_path / "rows.json")
    assert {(row.ranks, row.gbps) for row in found} == {
        ("+".join(map(str, case.ranks)), case.gbps) for case in [*ALL_REDUCES, *TRAININGS]
    }
    assert all(row.predicted_s > 0 and row.measured_s == 1.0 for row in found)
    written = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["predicted_s"] for row in written] == [row.predicted_s for row in found]
