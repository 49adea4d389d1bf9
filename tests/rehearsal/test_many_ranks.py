import math

import pytest
from megabatch_lab.rehearsal import backends

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


def members_of_exchanges(world: World, config: RunConfig) -> set[int]:
    """Return the numbers of members of all all-to-alls, from the start to the third step."""
    backends.log.clear()
    three_steps(world, config)
    return {each.num_members for each in backends.log if each.op == "alltoall"}


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", "same"), ("fp32", "bf16")])
def test_no_exchange_has_more_members_than_nodes(ranks: RankPool, precision: str, dtype: str) -> None:
    """Neither while links are measured, nor in the warm-up pass."""
    config = tiny_for(2048, f"precision.name={precision}", f"comm.dtype={dtype}", "comm.bucket_mb=auto")
    (members,) = ranks.run(members_of_exchanges, config, num_ranks=1, join=mirrored(2048, 8))
    assert max(members) == 2048 // 8


@pytest.mark.parametrize("algorithm", ["flat", "hierarchical", "torus"])
@pytest.mark.parametrize(("num_ranks", "precision"), [(2048, "fp16"), (16_384, "fp32")])
def test_one_mirrored_rank_of_thousands_trains(ranks: RankPool, num_ranks: int, precision: str, algorithm: str) -> None:
    config = tiny_for(num_ranks, f"precision.name={precision}", f"comm.algorithm={algorithm}", "comm.bucket_mb=auto")
    (records,) = ranks.run(three_steps, config, num_ranks=1, join=mirrored(num_ranks, 8))
    assert [record.step for record in records] == [1, 2, 3]
    assert all(math.isfinite(record.loss) for record in records)
