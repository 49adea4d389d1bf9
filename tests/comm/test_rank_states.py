"""The reports of thousands of ranks that fail at once, simulated with one store."""

import json
from typing import Any

import pytest
import torch.distributed as dist

from megabatch.comm import groups
from megabatch.comm.faults.watchdog import MOST, SEARCHES, WAITS, RankStates
from megabatch.comm.groups import Groups
from tests.support.store_requests import CountingStore

NUM_RANKS = 2048


def of_rank(store: Any, rank: int) -> RankStates:
    return RankStates(store, rank, range(NUM_RANKS), timeout_s=0.05)


@pytest.fixture
def store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]


def write_all(store: Any, silent: set[int], messages: dict[int, str]) -> None:
    for rank in set(range(NUM_RANKS)) - silent:
        of_rank(store, rank).write(messages.get(rank, WAITS), is_final=True)


def test_few_requests_find_the_silent_rank_and_the_reports_among_many_ranks(store: Any) -> None:
    write_all(store, {700}, {9: "has aborted: ValueError", 3: "has reduced 0 buckets"})
    requests = CountingStore(store)
    asking = of_rank(requests, 5)
    assert asking.peer_reports(waits_for_all=True) == [
        "rank 700 does not respond: exited or hung",
        "rank 3 has reduced 0 buckets",
        "rank 9 has aborted: ValueError",
    ]
    assert asking.peer_reports(waits_for_all=False) == [
        "rank 3 has reduced 0 buckets",
        "rank 9 has aborted: ValueError",
    ]
    assert requests.counted.total() < 100


def test_only_the_first_askers_name_some_of_many_silent_ranks(store: Any) -> None:
    write_all(store, set(range(100, 400)), {})
    asking, some = of_rank(store, 5), "100, 101, 102, 103, 104, 105, 106, 107"
    for _ in range(SEARCHES):
        assert asking.peer_reports(waits_for_all=True)[0].startswith(
            f"ranks {some} and 292 more do not respond: exited"
        )
    assert asking.peer_reports(waits_for_all=True)[0].startswith("300 ranks do not respond: exited or hung")


def test_few_reports_are_read_if_all_ranks_abort(store: Any) -> None:
    write_all(store, set(), {rank: f"has aborted: {rank}" for rank in range(NUM_RANKS)})
    requests = CountingStore(store)
    said = of_rank(requests, 5).peer_reports(waits_for_all=True)
    assert len(said) == MOST and all("has aborted" in text and "rank 5 " not in text for text in said)
    assert requests.counted.total() < 100


def test_withdrawn_report_is_not_quoted_and_the_final_one_stays(store: Any) -> None:
    other, asking = of_rank(store, 7), of_rank(store, 5)
    other.write("has reduced 0 buckets")
    assert asking.peer_reports(waits_for_all=False) == ["rank 7 has reduced 0 buckets"]
    other.withdraw()
    assert asking.peer_reports(waits_for_all=False) == [] and asking.num_silent() == NUM_RANKS
    other.write("has aborted", is_final=True)
    other.withdraw()
    other.write("has reduced 1 bucket")
    assert asking.peer_reports(waits_for_all=False) == ["rank 7 has aborted"] and asking.num_silent() == NUM_RANKS - 1
    other.write(WAITS, is_final=True)
    assert asking.peer_reports(waits_for_all=False) == [] and asking.num_silent() == NUM_RANKS - 1


def test_different_layout_is_found_without_reading_all(store: Any) -> None:
    ours, theirs = (json.dumps([["0.weight", "torch.float32", [2, 2], strides]]) for strides in ([2, 1], [1, 2]))
    members = range(0, NUM_RANKS, 8)
    assert of_rank(store, 0).differences(ours, members) == []  # no other rank has reported
    said = "rank 0 has 0.weight [2, 2] of float32 with strides (2, 1), rank 16 has 0.weight [2, 2] of float32 with"
    assert of_rank(store, 16).differences(theirs, members)[0].startswith(said)
    requests = CountingStore(store)
    assert of_rank(requests, 800).differences(ours, members)[0].startswith(said)
    assert requests.counted.total() < 20


def test_real_store_takes_the_keys_of_16384_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    tcp = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # type: ignore[attr-defined]
    monkeypatch.setattr(groups, "default_store", lambda: tcp)
    stores = []
    for names in (range(16_384), range(16_383), range(16_384)):
        made = Groups.__new__(Groups)
        made.names, made.rank = tuple(names), 0
        stores.append(made.make_store())
        stores[-1].set("key", str(len(stores)))
    assert [store.get("key") for store in stores] == [
        b"1",
        b"2",
        b"3",
    ]  # each object of the same ranks has a separate store
