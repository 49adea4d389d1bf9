import pytest

from megabatch.data.catalog import load_data_set
from megabatch.errors import NotSaved
from megabatch.ranks.world import World
from megabatch.runs.records import EvaluationRecord
from megabatch.training.loop import train
from megabatch.training.prepare import ready_to_train
from tests.support.rank_pool import RankPool
from tests.support.small_runs import small_run


def stop_asked_of_the_last_rank(world: World, at_step: int) -> tuple[int, bool]:
    """Request a stop from the last rank only, in the middle of step `at_step`."""
    config = small_run("train.epochs=2.4")  # 15 steps
    asked = 0

    def stop_requested() -> bool:
        nonlocal asked
        asked += 1  # once per step
        return world.rank == world.num_ranks - 1 and asked == at_step

    records = list(train(ready_to_train(config, load_data_set(config.data), world, stop_requested=stop_requested)))
    return records[-1].step, isinstance(records[-1], EvaluationRecord)


def test_a_stop_request_to_one_rank_stops_all_after_the_same_step(ranks: RankPool) -> None:
    """An evaluation due after the last step still runs: a resumed run would not repeat it."""
    for at_step, evaluated in ((1, False), (5, False), (7, True), (15, True)):
        for num_ranks in range(1, ranks.size + 1):
            if 8 % num_ranks == 0:  # microbatches
                results = ranks.run(stop_asked_of_the_last_rank, at_step, num_ranks=num_ranks)
                assert results == [(at_step, evaluated)] * num_ranks


def leave(world: World, error: BaseException | None, by_all: bool = False) -> str:
    try:
        with world.rank_0_leaves_first():
            if error and (by_all or world.rank == 0):
                raise error
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"
    return "left"


def fail_and_leave(world: World) -> str:
    leave(world, OSError("on all ranks"), by_all=True)
    return leave(world, None)


@pytest.mark.parametrize(
    ("error", "of_rank_0", "of_others"),
    [
        (None, "left", "left"),
        (NotSaved("the disk is full"), "NotSaved: the disk is full", "NotSaved: the disk is full"),
        (OSError("a fault"), "OSError: a fault", "FirstRankFailed: a fault"),
    ],
)
def test_stopped_ranks_end_like_rank_0(
    ranks: RankPool, error: BaseException | None, of_rank_0: str, of_others: str
) -> None:
    assert ranks.run(leave, error, num_ranks=2) == [of_rank_0, of_others]


def test_the_end_of_an_attempt_is_not_taken_for_an_earlier_one(ranks: RankPool) -> None:
    assert ranks.run(fail_and_leave, num_ranks=2) == ["left", "left"]
