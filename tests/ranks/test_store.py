import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megabatch.ranks import store as store_module
from megabatch.ranks.discover import NOT_KNOWN, RankInfo
from megabatch.ranks.store import (
    KEYS_AT_ONCE,
    agree_on_name,
    await_end,
    first_absent,
    gather_through,
    locate,
    places,
    report_end,
)
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


def test_places_count_the_ranks_of_each_host() -> None:
    assert places(["a", "b", "a", "a", "c", "b"]) == [(0, 3), (0, 2), (1, 3), (2, 3), (0, 1), (1, 2)]


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_ranks_that_no_launcher_placed_find_their_places_from_their_hosts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = threading.local()
    monkeypatch.setattr(store_module, "host_identity", lambda: here.name)
    shared, found = dist.HashStore(), dict[int, RankInfo]()  # type: ignore[attr-defined]

    def come(rank: int, host: str, local_rank: int) -> None:
        here.name = host
        own = shared if kind == "hash" else dist.FileStore(str(tmp_path / "store"), -1)  # type: ignore[attr-defined]
        found[rank] = locate(own, RankInfo(rank, 4, local_rank))

    given = [("one", NOT_KNOWN), ("two", NOT_KNOWN), ("one", NOT_KNOWN), ("two", 5)]  # which LOCAL_RANK says
    threads = [threading.Thread(target=come, args=(rank, *place)) for rank, place in enumerate(given)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(found[rank].local_rank, found[rank].num_local_ranks) for rank in range(4)] == [
        (0, 2),
        (0, 2),
        (1, 2),
        (5, 2),
    ]


def test_rank_0_places_many_ranks_with_few_requests_and_a_rank_that_knows_its_place_makes_none() -> None:
    num_ranks = KEYS_AT_ONCE + 1
    store = dist.HashStore()  # type: ignore[attr-defined]
    for rank in range(1, num_ranks):
        store.set(f"host-of/{rank}", f"host {rank // 8}")
    requests = Requests(store)
    locate(requests, RankInfo(0, num_ranks))  # type: ignore[arg-type]
    assert requests.counted == {"set": 1, "multi_get": 2, "multi_set": 2, "get": 1}
    assert store.get(f"place-of/{num_ranks - 2}") == b"7 8"
    requests.counted.clear()
    assert locate(requests, RankInfo(3, 4, 1, 2)) == RankInfo(3, 4, 1, 2)  # type: ignore[arg-type]
    assert not requests.counted


def test_rank_0_leaves_when_all_ranks_have_read_what_it_reports() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    reporting = threading.Thread(target=report_end, args=(store, "end", 3, "saved"))
    reporting.start()
    assert await_end(store, "end", 60.0) == "saved"
    assert reporting.is_alive()
    assert await_end(store, "end", 60.0) == "saved"
    reporting.join()
    report_end(store, "another end", 3, "failed", waits=False)
    assert await_end(store, "another end", 60.0) == "failed"


def test_a_rank_waits_for_rank_0_no_longer_than_it_is_told_or_than_the_store_is_there() -> None:
    assert await_end(dist.HashStore(), "end", 0.05) is None  # type: ignore[attr-defined]

    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("connection reset by peer")

        def set(self, key: str, text: str) -> None:
            raise dist.DistNetworkError("connection reset by peer")

    assert await_end(Gone(), "end", 60.0) is None  # type: ignore[arg-type]
    report_end(Gone(), "end", 2, "saved")  # type: ignore[arg-type]
