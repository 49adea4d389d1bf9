import time

from megabatch.data.catalog import load_data_set
from megabatch.ranks.world import World
from megabatch.runs.records import StepRecord
from megabatch.training.loop import train
from megabatch.training.prepare import ready_to_train
from tests.support.rank_pool import RankPool
from tests.support.small_runs import small_run


def train_with_a_slow_rank(world: World, slow: int) -> tuple[int, float]:
    """Train with one rank that joins every exchange 30 ms late."""

    def come_late() -> bool:
        if world.rank == slow:
            time.sleep(0.03)
        return False

    config = small_run("train.epochs=2")
    records = list(train(ready_to_train(config, load_data_set(config.data), world, stop_requested=come_late)))
    last = [record for record in records if isinstance(record, StepRecord)][-1]
    return last.straggler, last.straggler_delay_s


def test_all_ranks_name_the_late_rank(ranks: RankPool) -> None:
    for num_ranks, slow in ((2, 0), (2, 1), (4, 2)):
        if num_ranks <= ranks.size:
            results = ranks.run(train_with_a_slow_rank, slow, num_ranks=num_ranks)
            assert [straggler for straggler, _ in results] == [slow] * num_ranks
            assert all(delay_s > 0 for _, delay_s in results)
    assert ranks.run(train_with_a_slow_rank, 0, num_ranks=1) == [(0, 0.0)]
