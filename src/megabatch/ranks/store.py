"""What ranks tell each other outside of collectives, through the store at which they found each other.

A rank that fails takes the others with it: they see a broken connection.  The first one to fail says so here, before it
leaves, and alone speaks to the user.  The run's folder is set here too, for the one that logs and for restarted ranks.
"""

import os
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from megabatch.errors import UserError
from megabatch.ranks.discover import NOT_KNOWN, RankInfo, rendezvous_address
from megabatch.ranks.failures import FAILURE, Report, joined_key
from megabatch.ranks.machine import LOOPBACK, address_of, host_identity, listening_on
from megabatch.ranks.signals import was_launched
from megabatch.runs.files import LOCK
from megabatch.telemetry.activity import LastWords

TIMEOUT_S = 300.0  # as the store's own
GRACE_S = 30.0
LEAVE_S = 10.0  # for ranks to read that rank 0 has saved
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 1.0
MOST_NAMED = 8  # ranks that a message names
# The store's server reads a request again from its beginning with every piece that arrives: 16,384 keys in one request
# take it 0.3 s, in eight 0.02 s.
KEYS_AT_ONCE = 2048
RUN_FOLDER, USER_ERROR = "run-folder", "user-error"  # keys
STORE_FILE = "MEGABATCH_STORE"  # the variable with the file of our launcher's store, which its ranks inherit


class RankStore:
    def __init__(self, info: RankInfo) -> None:
        self.lasting = open_store(info)  # a launcher's outlives its ranks
        if was_launched():
            self.lasting.set(joined_key(info.rank), "")
        # Restarted ranks must not find the addresses of those before.
        self.store = dist.PrefixStore(agree_on_name(self.lasting, info), self.lasting)  # type: ignore[attr-defined]
        self.info = locate(self.store, info)
        self.is_first: bool | None = None
        self.last_words = LastWords()

    def is_first_to_fail(self) -> bool:
        """Asked by a rank that fails, first of all while the others still trust it."""
        if self.is_first is None:
            try:
                self.is_first = self.store.add("failures", 1) == 1
            except RuntimeError:  # rank 0 held the store and is gone, perhaps with its host: one of each host says it
                self.is_first = self.info.local_rank == (1 if self.info.is_alone else 0)
        return self.is_first

    @contextmanager
    def failures_announced(self) -> Iterator[None]:
        """An error inside is announced before it leaves: that a user's mistake was made, for restarted ranks too."""
        try:
            yield
        except BaseException as error:
            if self.is_first_to_fail() and isinstance(error, UserError):
                self.set(USER_ERROR, str(error))
            raise

    def set(self, key: str, text: str) -> None:
        """For this attempt and later ones."""
        self.lasting.set(key, text)

    def get(self, key: str) -> str | None:
        try:
            return self.lasting.get(key).decode() if self.lasting.check([key]) else None
        except RuntimeError:
            return None

    def report(self, report: Report) -> None:
        """For our launcher."""
        self.set(FAILURE, msgspec.json.encode(report).decode())

    def run_folder(self) -> Path | None:
        """The run's folder, where it is known and this host sees it: one that a run has held, whoever has said so."""
        path = self.get(RUN_FOLDER)
        with suppress(OSError):  # a name that is none
            return Path(path) if path and (Path(path) / LOCK).is_file() else None
        return None


def agree_on_name(store: "dist.Store", info: RankInfo, timeout_s: float = TIMEOUT_S) -> str:  # type: ignore[name-defined]
    """A name for this attempt, which rank 0 gives.

    What earlier ranks have left in the store must not be taken for an answer, and torchrun's count of restarts differs
    between hosts (it leaves out those that another host has caused).  So each rank asks with a word of its own.
    A rank makes four requests, and rank 0 as many for every KEYS_AT_ONCE ranks; it looks again, less and less often,
    for thanks that are under way, and for ranks that follow those that are no more.
    """
    own = uuid.uuid4().hex
    if info.rank != 0:
        return ask_for_name(store, info.rank, own, timeout_s)
    others = range(1, info.num_ranks)
    hellos, thanks = ([f"{kind}/{rank}" for rank in others] for kind in ("hello", f"thanks/{own}"))
    deadline_s, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
    have_come, answered = not others or are_set(store, hellos, timeout_s), set[str]()
    while have_come and others:
        found = [word.decode() for some in batches(hellos) for word in store.multi_get(some)]
        words = [word for word in found if word not in answered]
        for some in batches(words):
            store.multi_set([f"welcome/{word}" for word in some], [own] * len(some))
        answered.update(words)
        if all(store.check(some) for some in batches(thanks)):
            break
        have_come = time.monotonic() < deadline_s
        time.sleep(pause_s)  # and not a wait, whose end torch would warn of
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    if not have_come:
        awaited = thanks if answered else hellos
        ranks = ", ".join(key.rpartition("/")[2] for key in first_absent(store, awaited, MOST_NAMED))
        raise TimeoutError(f"of {info.num_ranks} ranks {ranks} did not come within {timeout_s:g} s; see their output")
    return own


def ask_for_name(store: "dist.Store", rank: int, word: str, timeout_s: float) -> str:  # type: ignore[name-defined]
    store.set(f"hello/{rank}", word)
    # Longer than rank 0 waits for the others: it knows who is missing.
    if not are_set(store, [f"welcome/{word}"], timeout_s + GRACE_S):
        raise TimeoutError(f"rank 0 did not answer within {timeout_s + GRACE_S:g} s; see its output")
    name = str(store.get(f"welcome/{word}").decode())
    store.set(f"thanks/{name}/{rank}", "")
    return name


def are_set(store: "dist.Store", keys: list[str], timeout_s: float) -> bool:  # type: ignore[name-defined]
    """Whether all of these are there, now or within so many seconds."""
    deadline_s = time.monotonic() + timeout_s
    if not store.has_extended_api():  # a FileStore, whose waits look too, end late, and fail like anything else
        while not store.check(keys) and time.monotonic() < deadline_s:
            time.sleep(FIRST_PAUSE_S)
        return bool(store.check(keys))
    try:
        for some in batches(keys):
            left_s = deadline_s - time.monotonic()
            store.wait(some, timedelta(seconds=max(left_s, 0.001)))  # 0 would be for ever
    except dist.DistStoreError:
        return False
    return True


def batches(keys: list[str]) -> Iterator[list[str]]:
    return (keys[begin : begin + KEYS_AT_ONCE] for begin in range(0, len(keys), KEYS_AT_ONCE))


def first_absent(store: "dist.Store", keys: Sequence[str], most: int) -> list[str]:  # type: ignore[name-defined]
    """The first of these keys that nobody has set, at most so many, by bisection: log2(len(keys)) requests for each."""
    if most < 1 or store.check(list(keys)):
        return []
    if len(keys) == 1:
        return list(keys)
    half = len(keys) // 2
    found = first_absent(store, keys[:half], most)
    return found + first_absent(store, keys[half:], most - len(found))


def gather_through(store: "dist.Store", rank: int, ranks: Sequence[int], text: str) -> list[str]:  # type: ignore[name-defined]
    """The texts of these ranks, all of which call it equally often."""
    turn = store.add(f"gathered-by/{rank}", 1)
    store.set(f"gathered/{turn}/{rank}", text)
    keys = [f"gathered/{turn}/{other}" for other in ranks]
    return get_all(store, keys)


def get_all(store: "dist.Store", keys: list[str]) -> list[str]:  # type: ignore[name-defined]
    """The values of these keys, once they are set."""
    some = store.multi_get if store.has_extended_api() else lambda keys: [store.get(key) for key in keys]
    return [content.decode() for each in batches(keys) for content in some(each)]


def set_all(store: "dist.Store", values: dict[str, str]) -> None:  # type: ignore[name-defined]
    if store.has_extended_api():
        for keys in batches([*values]):
            store.multi_set(keys, [values[key] for key in keys])
        return
    for key, value in values.items():
        store.set(key, value)


def report_end(store: "dist.Store", key: str, num_ranks: int, text: str, waits: bool = True) -> None:  # type: ignore[name-defined]
    """On rank 0, whose process may hold the store: `waits` until the others have read it, for LEAVE_S at most."""
    with suppress(RuntimeError):  # whoever held the store is gone, and all ranks see that
        store.set(key, text)
        deadline_s = time.monotonic() + LEAVE_S
        while waits and store.add(f"{key}/read", 0) < num_ranks - 1 and time.monotonic() < deadline_s:
            time.sleep(FIRST_PAUSE_S)


def await_end(store: "dist.Store", key: str, timeout_s: float) -> str | None:  # type: ignore[name-defined]
    """On the other ranks: what rank 0 reports; None if the time is up or the store is gone.

    It looks again and again, less and less often: a signal would not reach a rank that waits inside torch.
    """
    try:
        deadline_s, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
        while not store.check([key]):
            if time.monotonic() > deadline_s:
                return None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        text = str(store.get(key).decode())
        store.add(f"{key}/read", 1)
        return text
    except RuntimeError:
        return None


def locate(store: "dist.Store", info: RankInfo) -> RankInfo:  # type: ignore[name-defined]
    """Find this rank's place on its host, if no launcher said it, from the hosts of all ranks.

    Every rank sets its host and reads its place; rank 0 makes two more requests for every KEYS_AT_ONCE ranks.
    """
    if info.is_located:
        return info
    store.set(f"host-of/{info.rank}", host_identity())
    if info.rank == 0:
        hosts = get_all(store, [f"host-of/{rank}" for rank in range(info.num_ranks)])
        set_all(store, {f"place-of/{rank}": f"{here} {count}" for rank, (here, count) in enumerate(places(hosts))})
    local_rank, num_local_ranks = map(int, store.get(f"place-of/{info.rank}").split())
    given = info.local_rank != NOT_KNOWN  # a launcher that gives a rank its device by LOCAL_RANK means it
    return RankInfo(info.rank, info.num_ranks, info.local_rank if given else local_rank, num_local_ranks)


def places(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Of the host of every rank, how many ranks before it are on the same one, and how many in all."""
    seen, counts = Counter[str](), Counter(hosts)
    found = []
    for host in hosts:
        found.append((seen[host], counts[host]))
        seen[host] += 1
    return found


def open_store(info: RankInfo) -> "dist.Store":  # type: ignore[name-defined]
    """Where the ranks find each other: our launcher's or torchrun's own store, or one that rank 0 opens."""
    if was_launched() and STORE_FILE in os.environ:
        return dist.FileStore(os.environ[STORE_FILE], -1)  # type: ignore[attr-defined]
    if info.num_ranks == 1 and not was_launched():
        return dist.HashStore()  # type: ignore[attr-defined]
    host, port = rendezvous_address(info)
    if was_launched() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return dist.TCPStore(host, port, is_master=False)  # type: ignore[attr-defined]
    options: dict[str, Any] = {"is_master": info.rank == 0}
    if info.rank == 0:  # a server of torch's own would listen on all interfaces, whatever the name of its host
        options["master_listen_fd"] = listening_on(LOOPBACK if info.is_alone else address_of(host), port).detach()
    return dist.TCPStore(LOOPBACK if info.is_alone else host, port, info.num_ranks, **options)  # type: ignore[attr-defined]
