"""Predictions for published ResNet-50 runs (published.csv), and their errors.

A row of the file is a published run: its source, ranks, batch and images/s; how to simulate it (preset, overrides,
overlap, precision); and its role.  `calibrates`: a device's curve or a constant was fitted to it.  `predicted`: nothing
was fitted to it.  `timed`: as predicted, but only its minutes are known (batches.py).  `left out`: not simulated, with
the reason.  Only predicted rows are scored.

Sources: mlp-vX is mlcommons/training_results_vX, whose raw logs give images/s (the median over evaluation blocks except
the first, of five runs); ddl is HKBU-HPML/ddl-benchmarks @30de09bc.

Some pairs of rows differ only in ranks, in the network card, or in the overlap of communication.  The ratio of such a
pair shows whether that one factor is modelled, independent of the device's speed.

Held out: each row on several nodes is also predicted without its cluster, from curves without all points of its
machines, those of single nodes included; and each row of fewer than SMALL images per GPU without all such points of
its device.
"""

import csv
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from megabatch.errors import UserError
from megabatch.simulate.cluster import Cluster
from megabatch.simulate.device import ThroughputPoint
from megabatch.simulate.load import load_cluster
from megabatch.simulate.scenario import Scenario, Simulated, simulate
from megabatch.simulate.step import AllReduceSettings, Overlap
from megabatch.simulate.workload import load_workload

FILE = Path(__file__).with_name("published.csv")
DIFFERENT = 0.03  # of images/s: below it, the order of two measurements is noise
SMALL = 60  # images per GPU
# The machines of a preset's rows on several nodes, as the sources of points name them.
MACHINES = {
    "dgx1-v100": ("dgx1_", "C4140"),
    "dgx2h-v100": ("dgx2h_",),
    "dgx-a100-2020": ("dgxa100_",),
    "r750xa-a100": ("R750xa", "DSS8440"),
    "xe8545-a100": ("XE8545",),
    "dgx-a100": ("dgxa100_", "R5500G5", "XE9680"),
    "dgx-h100": ("dgxh100_", "XE9680"),
    "hkbu-10gbe": ("ddl",),
    "hkbu-ib100": ("ddl",),
    "aws-p3-25gbe": ("horovod#779", "aws-samples"),  # both are p3.16xlarge
}


class Published(Struct, frozen=True, kw_only=True):
    """A row of the file; "" if the source does not state the value."""

    source: str
    system: str
    accelerator: str
    ranks: int | str
    nodes: int | str
    batch_per_rank: float | str
    images_per_s: float | str
    p5: str
    p95: str
    step_ms: str
    minutes: str
    epochs: str
    network: str
    cluster: str
    overrides: str
    overlap: Overlap | str
    algorithm: str
    precision: str
    role: str
    reason: str

    @property
    def is_mlperf(self) -> bool:
        return self.source.startswith("mlp-")

    @property
    def has_speed(self) -> bool:
        return self.role in ("calibrates", "predicted")

    @property
    def setup(self) -> str:
        """Return a name that pairs of rows share, without MLPerf system names: these contain nodes and cards."""
        return self.source.split("/")[0] if self.is_mlperf else f"{self.source} {self.system}"


class Prediction(NamedTuple):
    row: Published
    simulated: Simulated

    @property
    def measured(self) -> float:
        return float(self.row.images_per_s)

    @property
    def ratio(self) -> float:
        """Return predicted divided by measured images/s."""
        return self.simulated.images_per_s / self.measured

    @property
    def error(self) -> float:
        return abs(self.ratio - 1)

    @property
    def is_in_interval(self) -> bool:
        return self.simulated.low_images_per_s <= self.measured <= self.simulated.high_images_per_s


class Pair(NamedTuple):
    first: Prediction
    second: Prediction

    @property
    def error(self) -> float:
        """Return the relative error of the ratio of the two rows."""
        return abs(self.second.ratio / self.first.ratio - 1)

    @property
    def differs(self) -> bool:
        """Return True if the measurements differ by more than noise."""
        low, high = sorted((self.first.measured, self.second.measured))
        return high / low - 1 > DIFFERENT

    @property
    def has_right_order(self) -> bool:
        predicted = self.second.simulated.images_per_s - self.first.simulated.images_per_s
        return predicted * (self.second.measured - self.first.measured) > 0


class Scores(NamedTuple):
    predictions: list[Prediction]
    ranks: list[Pair]
    cards: list[Pair]
    overlaps: list[Pair]

    @property
    def median_error(self) -> float:
        return statistics.median(prediction.error for prediction in self.predictions)

    def share_within(self, error: float) -> float:
        return share(prediction.error <= error for prediction in self.predictions)

    @property
    def share_in_interval(self) -> float:
        return share(prediction.is_in_interval for prediction in self.predictions)

    @property
    def share_in_order(self) -> float:
        return share(pair.has_right_order for pair in self.overlaps if pair.differs)


def share(are: Iterable[bool]) -> float:
    return statistics.fmean(map(float, are))


def read_rows(path: Path = FILE) -> list[Published]:
    with path.open(newline="") as file:
        return [msgspec.convert(row, Published, strict=False) for row in csv.DictReader(file)]


def predict(row: Published, is_held_out: Callable[[ThroughputPoint], bool] = lambda point: False) -> Prediction:
    scenario = Scenario(
        workload=load_workload("resnet50"),
        cluster=without_points(load_cluster(row.cluster, row.overrides.split()), is_held_out),
        num_ranks=int(row.ranks),
        batch_per_rank=int(row.batch_per_rank),
        precision=row.precision,
        all_reduce=AllReduceSettings(algorithm=row.algorithm, overlap=row.overlap),  # type: ignore[arg-type]
    )
    return Prediction(row, simulate(scenario))


def predict_all(role: str, rows: Iterable[Published]) -> list[Prediction]:
    return [predict(row) for row in rows if row.role == role]


def without_points(cluster: Cluster, is_held_out: Callable[[ThroughputPoint], bool]) -> Cluster:
    curves = {
        precision: [
            replace(curve, points=tuple(point for point in curve.points if not is_held_out(point))) for curve in of_one
        ]
        for precision, of_one in cluster.device.curves.items()
    }
    return replace(cluster, device=replace(cluster.device, curves=curves))


class HeldOut(NamedTuple):
    """The rows on several nodes of a cluster, predicted without the points of its machines."""

    cluster: str
    num_points: int  # removed
    predictions: list[Prediction]
    left: list[Published]  # rows that cannot be held out: no point of their GPU remains


def predict_without_cluster(rows: Iterable[Published]) -> list[HeldOut]:
    several = [row for row in rows if row.has_speed and int(row.nodes) > 1]
    return [
        hold_out(cluster, machines, [row for row in several if row.cluster == cluster])
        for cluster, machines in MACHINES.items()
    ]


def hold_out(cluster: str, machines: Sequence[str], rows: Iterable[Published]) -> HeldOut:
    def is_held_out(point: ThroughputPoint) -> bool:
        return any(machine in point.source for machine in machines)

    curves = load_cluster(cluster).device.curves.values()
    num_points = sum(is_held_out(point) for of_one in curves for curve in of_one for point in curve.points)
    predictions, left = list[Prediction](), list[Published]()
    for row in rows:
        try:
            predictions.append(predict(row, is_held_out))
        except UserError:  # the curve has no point, or none of this variant
            left.append(row)
    return HeldOut(cluster, num_points, predictions, left)


def predict_without_small(rows: Iterable[Published]) -> list[Prediction]:
    """Predict every row of fewer than SMALL images per GPU from curves without such points."""
    small = [row for row in rows if row.has_speed and row.is_mlperf and float(row.batch_per_rank) < SMALL]
    return [predict(row, lambda point: point.batch < SMALL) for row in small]


def score(predictions: Sequence[Prediction]) -> Scores:
    def pairs(*, but: Callable[[Published], Hashable], same: Callable[[Published], Hashable]) -> list[Pair]:
        return [
            Pair(first, second)
            for first, second in combinations(predictions, 2)
            if same(first.row) == same(second.row) and but(first.row) != but(second.row)
        ]

    return Scores(
        list(predictions),
        ranks=pairs(
            but=lambda row: row.ranks,
            same=lambda row: (row.setup, row.accelerator, row.network, row.batch_per_rank, row.overlap, row.overrides),
        ),
        cards=pairs(
            but=lambda row: row.network,
            same=lambda row: (row.setup, row.accelerator, row.ranks, row.nodes, row.batch_per_rank, row.overlap),
        ),
        overlaps=pairs(
            but=lambda row: row.overlap,
            same=lambda row: (row.source, row.accelerator, row.ranks, row.network, row.batch_per_rank, row.cluster),
        ),
    )
