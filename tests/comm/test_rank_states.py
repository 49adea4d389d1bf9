"""Thousands of ranks that fail at once, of which a few are played at one store."""

import json
from typing import Any

import pytest
import torch.distributed as dist

from megabatch.comm import groups
from megabatch.comm.faults.progress import WAITS
from megabatch.comm.faults.watchdog import MOST, SEARCHES, RankStates
from megabatch.comm.groups import Groups
from tests.support.store_requests import Requests

NUM_RANKS = 2048


def of_rank(store: Any, rank: int) -> RankStates:
    return RankStates(store, rank, range(NUM_RANKS), timeout_s=0.05)


@pytest.fixture
def store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]


def all_say(store: Any, silent: set[int], messages: dict[int, str]) -> None:
    for rank in set(range(NUM_RANKS)) - silent:
        of_rank(store, rank).write(messages.get(rank, WAITS), is_final=True)


def test_a_few_requests_find_who_is_silent_and_what_is_said_however_many_ranks_there_are(store: Any) -> None:
    all_say(store, {700}, {9: "has aborted: ValueError", 3: "has reduced 0 buckets"})
    requests = Requests(store)
    asking = of_rank(requests, 5)
    assert asking.heard(waits_for_all=True) == [
        "rank 700 says nothing: gone, or hanging",
        "rank 3 has reduced 0 buckets",
        "rank 9 has aborted: ValueError",
    ]
    assert asking.heard(waits_for_all=False) == ["rank 3 has reduced 0 buckets", "rank 9 has aborted: ValueError"]
    assert requests.counted.total() < 100


def test_many_silent_ranks_are_named_in_part_and_only_by_the_first_that_ask(store: Any) -> None:
    all_say(store, set(range(100, 400)), {})
    asking, some = of_rank(store, 5), "100, 101, 102, 103, 104, 105, 106, 107"
    for _ in range(SEARCHES):
        assert asking.heard(waits_for_all=True)[0].startswith(f"ranks {some} and 292 more say nothing: gone")
    assert asking.heard(waits_for_all=True)[0].startswith("300 ranks say nothing: gone, or hanging")


def test_of_ranks_that_all_abort_for_reasons_of_their_own_a_few_are_read(store: Any) -> None:
    all_say(store, set(), {rank: f"has aborted: {rank}" for rank in range(NUM_RANKS)})
    requests = Requests(store)
    said = of_rank(requests, 5).heard(waits_for_all=True)
    assert len(said) == MOST and all("has aborted" in text and "rank 5 " not in text for text in said)
    assert requests.counted.total() < 100


def test_what_is_true_no_longer_is_not_quoted_and_the_last_word_stays(store: Any) -> None:
    other, asking = of_rank(store, 7), of_rank(store, 5)
    other.write("has reduced 0 buckets")
    assert asking.heard(waits_for_all=False) == ["rank 7 has reduced 0 buckets"]
    other.withdraw()
    assert asking.heard(waits_for_all=False) == [] and asking.num_silent() == NUM_RANKS
    other.write("has aborted", is_final=True)
    other.withdraw()
    other.write("has reduced 1 bucket")
    assert asking.heard(waits_for_all=False) == ["rank 7 has aborted"] and asking.num_silent() == NUM_RANKS - 1
    other.write(WAITS, is_final=True)
    assert asking.heard(waits_for_all=False) == [] and asking.num_silent() == NUM_RANKS - 1


def test_a_layout_that_differs_is_found_without_reading_all(store: Any) -> None:
    ours, theirs = (json.dumps([["0.weight", "torch.float32", [2, 2], strides]]) for strides in ([2, 1], [1, 2]))
    members = range(0, NUM_RANKS, 8)
    assert of_rank(store, 0).differences(ours, members) == []  # nobody else has come
    said = "rank 0 has 0.weight [2, 2] of float32 with strides (2, 1), rank 16 has 0.weight [2, 2] of float32 with"
    assert of_rank(store, 16).differences(theirs, members)[0].startswith(said)
    requests = Requests(store)
    assert of_rank(requests, 800).differences(ours, members)[0].startswith(said)
    assert requests.counted.total() < 20


def test_a_real_store_takes_the_keys_of_16384_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    tcp = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # type: ignore[attr-defined]
    monkeypatch.setattr(groups, "default_store", lambda: tcp)
    stores = []
    for names in (range(16_384), range(16_383), range(16_384)):
        made = Groups.__new__(Groups)
        made.names, made.rank = tuple(names), 0
        stores.append(made.own_store())
        stores[-1].set("key", str(len(stores)))
    assert [store.get("key") for store in stores] == [b"1", b"2", b"3"]  # of those ranks, and of that object alone
