"""The batch that `simulate --batch auto` chooses for the GPUs of MLPerf's runs, beside the batch of the submitters.

Rows: MLPerf v1.0 and later, whose hyper-parameters are those of the reference convergence points; on one node only
NVIDIA's, because the others repeat them.  The minutes are those of the logs: training and evaluation until the target.
Of v4.0 only the minutes are known.  The speed of a calibrated row is a point of its device's curve.  Entries of
RECIPES.md on devices without a preset are listed, and predicted from their throughput if it is known.

The gain of another batch is the ratio of two predictions on the same GPUs, in which errors of the step nearly cancel.
It is called likely if it exceeds the doubt of the epochs of both batches, on which it depends, by the curve and also by
straight lines between the reference points.

Entries at batches that are not a reference point check the curve of epochs on its own, on any hardware.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from megabatch.cli.simulate_batch import MLPERF_EVALUATES_EVERY, known_spans
from megabatch.config.reference_results import epoch_points, middle_of
from megabatch.data.sources.shapes import IMAGENET
from megabatch.planning.epochs import EpochCurve, EpochPoint, fit_epochs
from megabatch.simulate.best_batch import Candidate, best_batch, candidate
from megabatch.simulate.job import Job
from megabatch.simulate.load import load_cluster
from megabatch.simulate.step import AllReduceSettings
from megabatch.simulate.workload import load_workload
from megabatch_lab.bench.published import Published

Line = dict[str, str]
EARLIER = ("mlp-v0.5", "mlp-v0.6", "mlp-v0.7")  # rounds with other hyper-parameters
# Runs to 75.9 % at batches that are not a reference point: system, batch and the epochs at which runs reached it.
OTHER_BATCHES = (
    ("v2.0, 2 A30", 408, "35"),
    ("v4.0, 6 RTX 4090", 1_536, "35"),
    ("v3.0, 8 Gaudi2", 2_048, "35"),
    ("v4.0, 8 H200", 3_200, "35"),
    ("v2.0, 256 IPU", 10_240, "45"),
    ("v3.0, 512 H100", 20_480, "50"),
    ("v3.0, 768 H100", 32_256, "56"),
    ("v2.0, 1,024 A100", 35_840, "56-60"),
    ("v4.0, 2,528 H100", 40_448, "66-70"),
    ("v2.0, TPU v4-6912", 55_296, "80"),
    ("v3.0, 3,584 H100", 57_344, "77"),
    ("v2.0, 4,216 A100", 67_456, "86"),
)

ROLES = {"calibrates": "calibrated", "predicted": "predicted", "timed": "predicted"}


class WithoutPreset(NamedTuple):
    run: str
    num_devices: int
    minutes: float
    batch: int
    images_per_s: int | None = None


WITHOUT_PRESET = (
    WithoutPreset("mlp-v2.0 NVIDIA 2xa30_ngc22.04_mxnet", 2, 235.574, 408, 3_189),
    WithoutPreset("mlp-v2.0 Google cloud-tpu-v4-6912-TF", 3_456, 0.23, 55_296),
    WithoutPreset("mlp-v2.0 Google cloud-tpu-v4-8192-TF", 4_096, 0.19, 32_768),
    WithoutPreset("mlp-v2.0 Graphcore ipu-pod256-TF1", 256, 2.672, 10_240),
    WithoutPreset("mlp-v3.0 Intel 16-nodes-SPR-pytorch", 32, 88.2, 3_264, 8_575),
    WithoutPreset("mlp-v3.0 Intel-HabanaLabs HLS-Gaudi2-PT", 8, 16.46, 2_048, 46_450),
    WithoutPreset("mlp-v4.0 6 RTX 4090", 6, 122, 1_536),
)


def batch_tables(rows: list[Published]) -> dict[str, list[Line]]:
    points = epoch_points("resnet50", IMAGENET.num_train)
    curve = fit_epochs(points, "MLPerf's reference convergence points")
    found = [(row, *predict(row, curve)) for row in compared(rows)]
    return {
        "epochs of the reference points": [reference_line(curve, point, points) for point in sorted(points)],
        "epochs of other batches": [other_line(curve, *entry) for entry in OTHER_BATCHES],
        "minutes to 75.9 %": [
            minutes_line(role, [(row, theirs) for row, theirs, _ in found if role in (ROLES[row.role], "all")])
            for role in ("predicted", "calibrated", "all")
        ],
        "batches of MLPerf": [
            *(line(curve, points, row, theirs, ours) for row, theirs, ours in found),
            *(line_without_preset(curve, entry) for entry in WITHOUT_PRESET),
        ],
    }


def reference_line(curve: EpochCurve, point: EpochPoint, points: Sequence[EpochPoint]) -> Line:
    without = fit_epochs([other for other in points if other != point], "the other points")
    return {
        "batch": f"{point.batch:,}",
        "epochs": f"{point.epochs:g}",
        "curve": f"{curve.epochs(point.batch):.1f}",
        "error": f"{curve.epochs(point.batch) / point.epochs - 1:+.1%}",
        "error without this point": f"{without.epochs(point.batch) / point.epochs - 1:+.1%}",
    }


def minutes_line(name: str, found: Sequence[tuple[Published, Candidate]]) -> Line:
    errors = [abs(theirs.minutes / float(row.minutes) - 1) for row, theirs in found]
    inside = sum(theirs.low_minutes <= float(row.minutes) <= theirs.high_minutes for row, theirs in found)
    return {
        "speed": name,
        "rows": str(len(found)),
        "median error": f"{median(errors):.1%}",
        "worst": f"{max(errors):.1%}",
        "in their intervals": f"{inside}, {inside / len(found):.0%}",
    }


def compared(rows: list[Published]) -> Iterator[Published]:
    for row in rows:
        is_later = row.is_mlperf and not row.source.startswith(EARLIER)
        if (
            is_later
            and row.role != "left out"
            and (int(row.nodes) > 1 or " NVIDIA/" in row.source or row.role == "timed")
        ):
            yield row


def fastest_runs(rows: Iterable[Published]) -> dict[tuple[str, int], Published]:
    """Return the fastest run of MLPerf on each preset as it is, by preset and ranks."""
    found: dict[tuple[str, int], Published] = {}
    for row in rows:
        if row.is_mlperf and row.minutes and row.role != "left out":
            clusters = (load_cluster(row.cluster, given) for given in (row.overrides.split(), []))
            place = row.cluster, int(row.ranks)
            before = found.get(place, row)
            if len({msgspec.json.encode(replace(cluster, sources={})) for cluster in clusters}) == 1:
                found[place] = min(before, row, key=lambda run: float(run.minutes))
    return found


def other_line(curve: EpochCurve, system: str, batch: int, epochs: str) -> Line:
    error = curve.epochs(batch) / middle_of(epochs) - 1
    return {
        "run": system,
        "batch": f"{batch:,}",
        "epochs": epochs,
        "curve": f"{curve.epochs(batch):.1f}",
        "error": f"{error:+.1%}",
        "in its interval": "yes" if abs(error) <= curve.doubt(batch) else "no",
    }


def predict(row: Published, curve: EpochCurve) -> tuple[Candidate, Candidate | None]:
    """Return the prediction for the batch of the submitters, and for the best one."""
    cluster = load_cluster(row.cluster, row.overrides.split())
    job = Job(
        name="resnet50",
        workload=load_workload("resnet50"),
        precision=row.precision,
        all_reduce=AllReduceSettings(algorithm=row.algorithm, overlap=row.overlap),  # type: ignore[arg-type]
        num_train=IMAGENET.num_train,
        num_test=IMAGENET.num_test,
        evaluate_every=MLPERF_EVALUATES_EVERY,
    )
    ranks, images = int(row.ranks), int(row.batch_per_rank)
    theirs = candidate(job, cluster, curve, ranks, ranks * images, images)
    return theirs, best_batch(job, cluster, curve, known_spans(job), ranks)


def line(
    curve: EpochCurve, points: Sequence[EpochPoint], row: Published, theirs: Candidate, ours: Candidate | None
) -> Line:
    def by_points(found: Candidate) -> float:
        """Return the minutes with the epochs between the two nearest reference points."""
        return found.minutes * interpolated(points, found.batch) / curve.epochs(found.batch)

    minutes = float(row.minutes)
    gain = 1 - ours.minutes / theirs.minutes if ours else 0.0
    if ours is None:
        verdict = "no known span of BatchNorm is as small"
    elif gain <= 0:
        verdict = "none"
    else:
        doubt = math.hypot(curve.doubt(ours.batch), curve.doubt(theirs.batch))
        least = min(gain, 1 - by_points(ours) / by_points(theirs))
        verdict = f"{gain:.1%}, {'likely' if least > doubt else 'uncertain'}"
    return {
        "run": row.source.replace("/results/", " "),
        "GPUs": f"{int(row.ranks):,}",
        "speed": ROLES[row.role],
        "minutes": f"{minutes:g}",
        "predicted": f"{theirs.minutes:.3g}",
        "interval": f"{theirs.low_minutes:.3g} to {theirs.high_minutes:.3g}",
        "error": f"{theirs.minutes / minutes - 1:+.1%}",
        "their batch": f"{theirs.batch:,}",
        "best": f"{ours.batch:,}" if ours else "-",
        "its minutes": f"{ours.minutes:.3g}" if ours else "-",
        "gain": verdict,
    }


def interpolated(points: Sequence[EpochPoint], batch: int) -> float:
    """Return the epochs on the straight line between two points, or of the outermost point."""
    known = sorted(points)
    if not known[0].batch < batch < known[-1].batch:
        return (known[0] if batch <= known[0].batch else known[-1]).epochs
    below, above = next(pair for pair in pairwise(known) if pair[1].batch >= batch)
    return below.epochs + (above.epochs - below.epochs) * (batch - below.batch) / (above.batch - below.batch)


def line_without_preset(curve: EpochCurve, entry: WithoutPreset) -> Line:
    """Return the minutes at the entry's throughput, without evaluations."""
    found = {"speed": "-: no preset, and no throughput", "predicted": "-", "interval": "-", "error": "-"}
    if entry.images_per_s:
        minutes = curve.epochs(entry.batch) * IMAGENET.num_train / entry.images_per_s / 60
        factor = 1 + curve.doubt(entry.batch)
        found = {
            "speed": "own throughput given",
            "predicted": f"{minutes:.3g}",
            "interval": f"{minutes / factor:.3g} to {minutes * factor:.3g}",
            "error": f"{minutes / entry.minutes - 1:+.1%}",
        }
    return {
        "run": entry.run,
        "GPUs": f"{entry.num_devices:,}",
        "speed": found["speed"],
        "minutes": f"{entry.minutes:g}",
        **found,
        "their batch": f"{entry.batch:,}",
        **dict.fromkeys(("best", "its minutes", "gain"), "-"),
    }
