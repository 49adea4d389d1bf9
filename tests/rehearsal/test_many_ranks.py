"""One rank of thousands, in a world that mirrors it."""

import math

import pytest

from megabatch.config.schema import RunConfig
from megabatch.ranks.world import World
from megabatch.runs.records import StepRecord
from megabatch.training.loop import train
from tests.support.rank_pool import RankPool
from tests.support.rehearsals import begin, mirrored, tiny_for


def three_steps(world: World, config: RunConfig) -> list[StepRecord]:
    records = train(begin(config, world))
    taken = [next(records) for _ in range(3)]
    records.close()
    assert all(isinstance(record, StepRecord) for record in taken)
    return taken  # type: ignore[return-value]


@pytest.mark.parametrize("algorithm", ["flat", "hierarchical", "torus"])
@pytest.mark.parametrize(("num_ranks", "precision"), [(2048, "fp16"), (16_384, "fp32")])
def test_a_rank_of_thousands_takes_its_steps(ranks: RankPool, num_ranks: int, precision: str, algorithm: str) -> None:
    config = tiny_for(num_ranks, f"precision.name={precision}", f"comm.algorithm={algorithm}", "comm.bucket_mb=auto")
    (records,) = ranks.run(three_steps, config, num_ranks=1, join=mirrored(num_ranks, 8))
    assert [record.step for record in records] == [1, 2, 3]
    assert all(math.isfinite(record.loss) for record in records)
