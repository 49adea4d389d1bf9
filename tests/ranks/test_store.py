import threading

import pytest
import torch.distributed as dist

from megabatch.ranks.discover import RankInfo
from megabatch.ranks.store import agree_on_name


def meet(store: dist.Store, num_ranks: int) -> list[str]:  # type: ignore[name-defined]
    names = [""] * num_ranks

    def come(rank: int) -> None:
        names[rank] = agree_on_name(store, RankInfo(rank, num_ranks, rank, num_ranks))

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(num_ranks)]
    for thread in reversed(threads):  # rank 0 comes last
        thread.start()
    for thread in threads:
        thread.join()
    return names


def test_ranks_agree_on_a_new_name_whatever_was_left_in_the_store() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    meetings = [meet(store, 3) for _ in range(3)]
    assert all(len(set(names)) == 1 for names in meetings)
    assert len({names[0] for names in meetings}) == 3


def test_ranks_that_do_not_come_are_named() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError, match=r"of 3 ranks 1, 2 did not come within 0.05 s"):
        agree_on_name(store, RankInfo(0, 3, 0, 3), timeout_s=0.05)
