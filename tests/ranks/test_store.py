import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megabatch.ranks import store as store_module
from megabatch.ranks.discover import NOT_KNOWN, RankInfo
from megabatch.ranks.store import (
    KEYS_AT_ONCE,
    RankStore,
    agree_on_name,
    await_end,
    first_absent,
    gather_via_store,
    local_ranks,
    locate,
    report_end,
)
from megabatch.telemetry.activity import START_UP_TIMEOUT_S
from tests.support.store_requests import CountingStore


def connect_all(store: Any, num_ranks: int) -> list[str]:
    names = [""] * num_ranks

    def join(rank: int) -> None:
        names[rank] = agree_on_name(store, RankInfo(rank, num_ranks, rank, num_ranks))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(num_ranks)]
    for thread in reversed(threads):  # rank 0 is last
        thread.start()
    for thread in threads:
        thread.join()
    return names


def test_each_attempt_agrees_on_a_new_name_in_the_same_store() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    attempts = [connect_all(store, 3) for _ in range(3)]
    assert all(len(set(names)) == 1 for names in attempts)
    assert len({names[0] for names in attempts}) == 3


def test_restarted_ranks_do_not_find_the_dump_signal_of_an_earlier_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's watchdog sets it when a rank is lost, and ends every process that finds it."""
    lasting = dist.HashStore()  # type: ignore[attr-defined]
    lasting.set("exception_dump", "rank 1")
    monkeypatch.setattr(store_module, "open_any_store", lambda info: lasting)
    store = RankStore(RankInfo(0, 1, 0, 1))
    assert not lasting.check(["exception_dump"])
    assert store.store.timeout.total_seconds() == START_UP_TIMEOUT_S  # of NCCL's first collectives


def test_the_limit_on_open_files_grows_with_the_number_of_ranks() -> None:
    """All ranks connect to the store of rank 0.  The limit is raised in another process, because it lasts."""
    code = """
import os, resource, socket
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.store import open_any_store
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
for num_ranks in (2, 2048):
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    open_any_store(RankInfo(0, num_ranks, 0, num_ranks))
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    few, many = (list(map(int, line.split())) for line in done.stdout.splitlines())
    assert few[0] == 1024 and many[0] == min(many[1], 8 * 2048 + 512)


def test_failures_are_counted_and_a_failed_rank_does_not_wait_for_others() -> None:
    shared = dist.HashStore()  # type: ignore[attr-defined]
    ranks = [RankStore(RankInfo(rank, 3, rank, 3), shared) for rank in range(3)]
    assert not any(rank.has_other_failed() for rank in ranks)
    assert ranks[1].register(ValueError("first")) and not ranks[0].register(ValueError("second"))
    assert ranks[1].register(ValueError("first")) and [rank.has_other_failed() for rank in ranks] == [
        False,
        False,
        True,
    ]


def test_rank_0_waits_for_the_successor_of_a_killed_rank() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("hello/1", "of a rank that was killed")
    names = dict[int, str]()

    def join(rank: int) -> None:
        names[rank] = agree_on_name(store, RankInfo(rank, 2, rank, 2))

    first = threading.Thread(target=join, args=(0,))
    first.start()
    store.get("welcome/of a rank that was killed")  # waits until rank 0 has answered it
    assert first.is_alive()
    join(1)
    first.join()
    assert names[0] == names[1]


def test_ranks_that_do_not_connect_are_reported() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError, match="of 3 ranks, 1, 2 did not connect"):
        agree_on_name(store, RankInfo(0, 3, 0, 3), timeout_s=0.05)
    for rank in range(1, 2000):
        store.set(f"hello/{rank}", f"token {rank}")
    with pytest.raises(TimeoutError, match="of 2002 ranks, 2000, 2001 did not connect"):
        agree_on_name(store, RankInfo(0, 2002, 0, 8), timeout_s=0.05)
    with pytest.raises(TimeoutError, match=r"of 2000 ranks, 1, .*7, 8 did not connect"):
        agree_on_name(store, RankInfo(0, 2000, 0, 8), timeout_s=0.05)  # they were answered and did not acknowledge


@pytest.mark.parametrize("num_ranks", [2, 64, KEYS_AT_ONCE + 1])
def test_number_of_requests_of_rank_0_does_not_depend_on_the_number_of_ranks(num_ranks: int) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    others = range(1, num_ranks)
    store.multi_set([f"hello/{rank}" for rank in others], [f"token {rank}" for rank in others])

    def acknowledge() -> None:
        name = store.get(f"welcome/token {others[-1]}").decode()
        store.multi_set([f"thanks/{name}/{rank}" for rank in others], [""] * len(others))

    acknowledging = threading.Thread(target=acknowledge)
    acknowledging.start()
    requests = CountingStore(store)
    agree_on_name(requests, RankInfo(0, num_ranks, 0, 8))  # type: ignore[arg-type]
    acknowledging.join()
    polls = requests.counted["check"]  # until the last acknowledgement
    assert requests.counted == {"wait": 1, "multi_get": polls, "multi_set": 1, "check": polls}


def test_first_absent_finds_the_same_keys_as_a_linear_search() -> None:
    for seed in range(20):
        generator = random.Random(seed)
        store = dist.HashStore()  # type: ignore[attr-defined]
        keys = [f"key {index}" for index in range(generator.randint(1, 200))]
        there = {key for key in keys if generator.random() < generator.choice((0.0, 0.5, 0.99, 1.0))}
        for key in there:
            store.set(key, "")
        requests, most = CountingStore(store), generator.randint(1, 8)
        found = first_absent(requests, keys, most)  # type: ignore[arg-type]
        assert found == [key for key in keys if key not in there][:most]
        assert requests.counted["check"] <= 1 + 2 * most * (len(keys).bit_length() + 1)


def test_a_subset_of_ranks_can_gather_texts_repeatedly() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    found: dict[int, list[list[str]]] = {}

    def gather(rank: int) -> None:
        found[rank] = [gather_via_store(store, rank, [3, 5], f"{turn} of {rank}") for turn in range(3)]

    threads = [threading.Thread(target=gather, args=(rank,)) for rank in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[3] == found[5] == [[f"{turn} of 3", f"{turn} of 5"] for turn in range(3)]


def test_local_ranks_count_the_ranks_of_each_host() -> None:
    assert local_ranks(["a", "b", "a", "a", "c", "b"]) == [(0, 3), (0, 2), (1, 3), (2, 3), (0, 1), (1, 2)]


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_ranks_find_their_local_ranks_from_their_hosts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = threading.local()
    monkeypatch.setattr(store_module, "host_identity", lambda: here.name)
    shared, found = dist.HashStore(), dict[int, RankInfo]()  # type: ignore[attr-defined]

    def join(rank: int, host: str, local_rank: int) -> None:
        here.name = host
        own = shared if kind == "hash" else dist.FileStore(str(tmp_path / "store"), -1)  # type: ignore[attr-defined]
        found[rank] = locate(own, RankInfo(rank, 4, local_rank))

    given = [("one", NOT_KNOWN), ("two", NOT_KNOWN), ("one", NOT_KNOWN), ("two", 5)]  # the last has LOCAL_RANK=5
    threads = [threading.Thread(target=join, args=(rank, *place)) for rank, place in enumerate(given)]
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


def test_rank_0_locates_many_ranks_with_few_requests_and_a_located_rank_makes_none() -> None:
    num_ranks = KEYS_AT_ONCE + 1
    store = dist.HashStore()  # type: ignore[attr-defined]
    for rank in range(1, num_ranks):
        store.set(f"host-of/{rank}", f"host {rank // 8}")
    requests = CountingStore(store)
    locate(requests, RankInfo(0, num_ranks))  # type: ignore[arg-type]
    assert requests.counted == {"set": 1, "multi_get": 2, "multi_set": 2, "get": 1}
    assert store.get(f"place-of/{num_ranks - 2}") == b"7 8"
    requests.counted.clear()
    assert locate(requests, RankInfo(3, 4, 1, 2)) == RankInfo(3, 4, 1, 2)  # type: ignore[arg-type]
    assert not requests.counted


def test_rank_0_waits_until_all_ranks_have_read_its_report() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    reporting = threading.Thread(target=report_end, args=(store, "end", 3, "saved"))
    reporting.start()
    assert await_end(store, "end", 60.0) == "saved"
    assert reporting.is_alive()
    assert await_end(store, "end", 60.0) == "saved"
    reporting.join()
    report_end(store, "another end", 3, "failed", waits=False)
    assert await_end(store, "another end", 60.0) == "failed"


def test_a_rank_stops_waiting_for_rank_0_after_the_timeout_or_without_a_store() -> None:
    assert await_end(dist.HashStore(), "end", 0.05) is None  # type: ignore[attr-defined]

    class LostStore:
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("connection reset by peer")

        def set(self, key: str, text: str) -> None:
            raise dist.DistNetworkError("connection reset by peer")

    assert await_end(LostStore(), "end", 60.0) is None  # type: ignore[arg-type]
    report_end(LostStore(), "end", 2, "saved")  # type: ignore[arg-type]
