"""Published trainings of ResNet-50 (published.csv), predicted, and how good the predictions are.

A row of the file is a run somebody has published: its source, ranks, batch and images/s; how it is simulated (a preset,
overrides, overlap, precision); and its role.  `calibrates`: a device's curve or a constant was fitted to it.
`predicted`: nothing was.  `left out`: with the reason.  Scores are of predicted rows alone.

Sources: mlp-vX is mlcommons/training_results_vX, whose raw logs give images/s (the median over evaluation blocks but
the first, of five runs); ddl is HKBU-HPML/ddl-benchmarks @30de09bc.

Two rows differ in one thing alone if all else in them is the same: in ranks; in the network card; in how communication
is overlapped.  Their ratio then tells whether that one thing is modelled, whatever the device's speed.
"""

import csv
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from megabatch.simulate.load import load_cluster
from megabatch.simulate.scenario import Scenario, Simulated, simulate
from megabatch.simulate.step import AllReduceSettings, Overlap
from megabatch.simulate.workload import load_workload

FILE = Path(__file__).with_name("published.csv")
DIFFERENT = 0.03  # of images/s: below it, an order of two measurements means nothing


class Published(Struct, frozen=True, kw_only=True):
    """A row of the file; "" where a source does not say."""

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
    def setup(self) -> str:
        """What was run; in MLPerf round and submitter, since the name of a system says its nodes and cards."""
        return self.source.split("/")[0] if self.is_mlperf else f"{self.source} {self.system}"


class Prediction(NamedTuple):
    row: Published
    simulated: Simulated

    @property
    def measured(self) -> float:
        return float(self.row.images_per_s)

    @property
    def ratio(self) -> float:
        """Predicted by measured images/s."""
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
        """Of the ratio of the two."""
        return abs(self.second.ratio / self.first.ratio - 1)

    @property
    def differs(self) -> bool:
        """True if their measurements do, by more than they may by chance."""
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


def predict(row: Published) -> Prediction:
    scenario = Scenario(
        workload=load_workload("resnet50"),
        cluster=load_cluster(row.cluster, row.overrides.split()),
        num_ranks=int(row.ranks),
        batch_per_rank=int(row.batch_per_rank),
        precision=row.precision,
        all_reduce=AllReduceSettings(algorithm=row.algorithm, overlap=row.overlap),  # type: ignore[arg-type]
    )
    return Prediction(row, simulate(scenario))


def predict_all(role: str, rows: Iterable[Published]) -> list[Prediction]:
    return [predict(row) for row in rows if row.role == role]


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
