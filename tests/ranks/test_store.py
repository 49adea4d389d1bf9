import random
import threading
from typing import Any

import pytest
import torch.distributed as dist

from megabatch.ranks.discover import RankInfo
from megabatch.ranks.store import KEYS_AT_ONCE, agree_on_name, first_absent, gather_through
from tests.support.store_requests import Requests


def meet(store: Any, num_ranks: int) -> list[str]:
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


def test_a_rank_that_left_a_word_and_is_no_more_is_waited_for_until_one_follows() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("hello/1", "of a rank that was killed")
    names = dict[int, str]()

    def come(rank: int) -> None:
        names[rank] = agree_on_name(store, RankInfo(rank, 2, rank, 2))

    first = threading.Thread(target=come, args=(0,))
    first.start()
    store.get("welcome/of a rank that was killed")  # waits: rank 0 has answered it, and looks again
    assert first.is_alive()
    come(1)
    first.join()
    assert names[0] == names[1]


def test_ranks_that_do_not_come_are_named() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError, match=r"of 3 ranks 1, 2 did not come within 0.05 s"):
        agree_on_name(store, RankInfo(0, 3, 0, 3), timeout_s=0.05)
    for rank in range(1, 2000):
        store.set(f"hello/{rank}", f"word {rank}")
    with pytest.raises(TimeoutError, match=r"of 2002 ranks 2000, 2001 did not come within 0.05 s"):
        agree_on_name(store, RankInfo(0, 2002, 0, 8), timeout_s=0.05)
    with pytest.raises(TimeoutError, match=r"of 2000 ranks 1, 2, 3, 4, 5, 6, 7, 8 did not come within 0.05 s"):
        agree_on_name(store, RankInfo(0, 2000, 0, 8), timeout_s=0.05)  # they have been answered, and did not thank


@pytest.mark.parametrize("num_ranks", [2, 64, KEYS_AT_ONCE + 1])
def test_rank_0_asks_as_often_for_many_ranks_as_for_two(num_ranks: int) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    others = range(1, num_ranks)
    store.multi_set([f"hello/{rank}" for rank in others], [f"word {rank}" for rank in others])

    def thank() -> None:
        name = store.get(f"welcome/word {others[-1]}").decode()
        store.multi_set([f"thanks/{name}/{rank}" for rank in others], [""] * len(others))

    thanking = threading.Thread(target=thank)
    thanking.start()
    requests = Requests(store)
    agree_on_name(requests, RankInfo(0, num_ranks, 0, 8))  # type: ignore[arg-type]
    thanking.join()
    looks = requests.counted["check"]  # until the last has thanked
    assert requests.counted == {"wait": 1, "multi_get": looks, "multi_set": 1, "check": looks}


def test_what_is_absent_is_found_as_by_asking_for_each() -> None:
    for seed in range(20):
        generator = random.Random(seed)
        store = dist.HashStore()  # type: ignore[attr-defined]
        keys = [f"key {index}" for index in range(generator.randint(1, 200))]
        there = {key for key in keys if generator.random() < generator.choice((0.0, 0.5, 0.99, 1.0))}
        for key in there:
            store.set(key, "")
        requests, most = Requests(store), generator.randint(1, 8)
        found = first_absent(requests, keys, most)  # type: ignore[arg-type]
        assert found == [key for key in keys if key not in there][:most]
        assert requests.counted["check"] <= 1 + 2 * most * (len(keys).bit_length() + 1)


def test_some_ranks_gather_texts_as_often_as_they_like() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    found: dict[int, list[list[str]]] = {}

    def gather(rank: int) -> None:
        found[rank] = [gather_through(store, rank, [3, 5], f"{turn} of {rank}") for turn in range(3)]

    threads = [threading.Thread(target=gather, args=(rank,)) for rank in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[3] == found[5] == [[f"{turn} of 3", f"{turn} of 5"] for turn in range(3)]
