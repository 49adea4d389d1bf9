import statistics
from collections import Counter
from pathlib import Path

import pytest
from megabatch_lab.bench.batches import fastest_runs
from megabatch_lab.bench.guide import CLUSTERS, climb, expect_line
from megabatch_lab.bench.merging import gains
from megabatch_lab.bench.published import (
    MACHINES,
    HeldOut,
    Pair,
    Prediction,
    Published,
    predict,
    predict_all,
    predict_without_cluster,
    predict_without_small,
    read_rows,
    score,
)
from megabatch_lab.bench.simulator import markdown, paper_tables, published_tables, with_table

from megabatch.cli.simulate_batch import PublishedRun, published_runs
from megabatch.simulate.compute import compute_by_curve
from megabatch.simulate.load import load_cluster, preset_names, read_cluster, with_device
from megabatch.simulate.workload import load_workload

ROWS = read_rows()
PAGE = Path(__file__).parents[3] / "docs/scaling.md"


def test_every_row_has_a_source_and_a_role() -> None:
    assert {row.role for row in ROWS} == {"predicted", "calibrates", "timed", "left out"}
    for row in ROWS:
        assert row.source
        assert row.reason if row.role == "left out" else row.cluster in preset_names()


def test_points_of_a_device_are_calibrating_rows() -> None:
    of_nodes = {(row.source, float(row.batch_per_rank)) for row in ROWS if row.role == "calibrates"}
    devices = {
        str(tables["device"]): tables["device"]
        for name in preset_names()
        for tables in [with_device(read_cluster(name))]
    }
    points = [
        point
        for device in devices.values()
        for curves in device["curves"].values()
        for curve in curves
        for point in curve["points"]
    ]
    from_mlperf = [point for point in points if point["source"].startswith("mlp-")]
    assert len(from_mlperf) > 100
    for point in from_mlperf:
        assert (point["source"], float(point["batch"])) in of_nodes


def test_preset_is_calibrated_on_at_most_one_multi_node_run() -> None:
    several = [row.cluster for row in ROWS if row.role == "calibrates" and int(row.nodes) > 1]
    assert len(several) == len(set(several)) == 5
    for row in ROWS:
        if row.role == "calibrates" and int(row.nodes) > 1:
            assert predict(row).error < 0.03


def test_waiting_time_of_a_point_equals_the_simulated_one() -> None:
    points = [
        point
        for name in ("dgx-a100", "dgx-a100-2020", "dgx2h-v100", "dgx-h100")
        for point in load_cluster(name).device.curves["fp16"][0].points
        if point.waited_ms
    ]
    assert len(points) == 4
    for point in points:
        row = next(row for row in ROWS if point.source.startswith(f"calibrates: {row.source},"))
        assert float(row.images_per_s) / int(row.ranks) == pytest.approx(point.images_per_s, rel=1e-4)
        step = predict(row).simulated.step
        assert point.waited_ms == pytest.approx(1e3 * (step.exposed_s + step.jitter_s), abs=0.02)


def test_no_predicted_row_is_a_point_of_a_curve() -> None:
    fitted = {(row.source, row.ranks) for row in ROWS if row.role == "calibrates" and row.source.startswith("mlp-")}
    assert not fitted & {(row.source, row.ranks) for row in ROWS if row.role == "predicted"}


@pytest.fixture(scope="module")
def clusters() -> list[HeldOut]:
    return predict_without_cluster(ROWS)


def test_held_out_rows_meet_the_goals(clusters: list[HeldOut]) -> None:
    by_cluster = [prediction for held_out in clusters for prediction in held_out.predictions]
    for predictions in (by_cluster, predict_without_small(ROWS)):
        errors = [prediction.error for prediction in predictions]
        assert statistics.median(errors) <= 0.07 and max(errors) <= 0.2
        assert statistics.fmean(prediction.is_in_interval for prediction in predictions) >= 0.9


def test_held_out_points_are_not_in_the_curve(clusters: list[HeldOut]) -> None:
    several = Counter(row.cluster for row in ROWS if row.has_speed and int(row.nodes) > 1)
    assert {held_out.cluster for held_out in clusters} == set(several)
    for held_out in clusters:
        assert held_out.num_points >= 1
        assert len(held_out.predictions) + len(held_out.left) == several[held_out.cluster]
        for row, simulated in held_out.predictions:
            machine = next(name for name in MACHINES[held_out.cluster] if name in row.source)
            curves = simulated.scenario.cluster.device.curves["fp16"]
            assert not any(machine in point.source for curve in curves for point in curve.points)
            assert simulated.images_per_s != predict(row).simulated.images_per_s


def test_runs_in_the_chart_are_the_fastest_rows() -> None:
    expected = [
        PublishedRun(cluster=cluster, ranks=ranks, minutes=float(row.minutes), source=row.source)
        for (cluster, ranks), row in sorted(fastest_runs(ROWS).items())
    ]
    assert {run.cluster for run in expected} >= {"xe8545-a100", "r750xa-a100", "dgx1-v100"}
    assert [run for run in published_runs() if run.source.startswith("mlp-")] == expected


def with_measured(prediction: Prediction, ratio: float) -> Prediction:
    """Return the prediction with a measured value that is off by this ratio."""
    values = {name: getattr(prediction.row, name) for name in prediction.row.__struct_fields__}
    return Prediction(
        Published(**values | {"images_per_s": prediction.simulated.images_per_s / ratio}), prediction.simulated
    )


def test_ratio_of_two_rows_is_independent_of_the_devices_speed() -> None:
    one = predict(next(row for row in ROWS if row.role == "predicted"))
    assert Pair(with_measured(one, 1.2), with_measured(one, 1.2)).error == pytest.approx(0)
    assert Pair(with_measured(one, 1.0), with_measured(one, 1.1)).error == pytest.approx(0.1)


def test_pairs_differ_in_one_factor() -> None:
    series = [row for row in ROWS if row.cluster == "hkbu-ib100" and row.role == "predicted" and int(row.ranks) < 32]
    scores = score([predict(row) for row in series])
    assert len(scores.ranks) == 3  # none, layer and fused, of 8 and 16
    assert len(scores.overlaps) == 6 and not scores.cards


def test_scaling_page_has_the_tables_of_the_bench() -> None:
    """Update with: megabatch bench simulator --part published --part paper --part guide --docs docs/scaling.md"""
    several = [row for row in ROWS if row.role == "calibrates" and int(row.nodes) > 1]
    calibrated, scores = predict_all("calibrates", several), score(predict_all("predicted", ROWS))
    tables = {**published_tables(ROWS, calibrated, scores), **paper_tables()}
    del tables["calibrated, one node"]  # a hundred rows on the fit of the curves
    text = page = PAGE.read_text()
    for title, lines in tables.items():
        text = with_table(text, title, lines)
    assert text == page
    # The tables of the guide take 15 s, so only rows with the paper's number of ranks are compared.
    for lines in ([expect_line(name, 2_048) for name in CLUSTERS], climb("p40-roce100", "alexnet_bn")):
        _, _, *rows = markdown(lines).splitlines(keepends=True)
        assert "".join(rows) in page


def test_merging_is_compared_with_the_best_of_all_single_plans() -> None:
    cluster = load_cluster("hkbu-10gbe")
    compute = compute_by_curve(load_workload("alexnet_bn"), cluster, "fp32", 64)
    row = gains(compute, cluster, 16)
    assert row["gain"] > 0.02 and row["gain_over_25_mb"] >= row["gain"]
