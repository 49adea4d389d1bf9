"""Communication of ranks outside of collectives, through the store that they connect to.

When a rank fails, the others fail too, with broken connections.  The first rank to fail registers in the store before
it disconnects, and only that rank reports to the user.  The store also has the run's folder, for the log of that rank
and for restarted ranks.
"""

import errno
import os
import platform
import socket
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from megabatch.errors import UserError
from megabatch.ranks.discover import NOT_KNOWN, RankInfo, launch_name, rendezvous_address
from megabatch.ranks.failures import FAILURE, PeerFailed, RankFailureReport, joined_key
from megabatch.ranks.machine import (
    LOOPBACK,
    address_towards,
    allow_descriptors,
    host_identity,
    interface_of,
    is_loopback,
    listen_address,
    listen_on,
    resolve,
)
from megabatch.ranks.signals import was_launched
from megabatch.runs.files import LOCK
from megabatch.telemetry.activity import START_UP_TIMEOUT_S, ExitReporter
from megabatch.text import print_line
from megabatch.torch_api import NCCL_DUMP_KEY

TIMEOUT_S = 300.0  # the default of torch's stores
GRACE_S = 30.0
RESOLVE_S = 10.0  # outside of Kubernetes, the name of rank 0's host is known at once
LEAVE_S = 10.0  # for the other ranks to read rank 0's result
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 1.0
SOCKETS_PER_RANK = 8  # an upper bound: connections to the store of rank 0, and Gloo's connections between ranks
MAX_NAMED = 8  # ranks listed in a message
# The store's server parses a request from its start again whenever more of it arrives: 16,384 keys take 0.3 s in one
# request and 0.02 s in eight.
KEYS_AT_ONCE = 2048
RUN_FOLDER, USER_ERROR, LAUNCH, ADDRESS, FAILURES = "run-folder", "user-error", "launch", "address", "failures"  # keys
STORE_FILE = "MEGABATCH_STORE"  # the variable with the path of the launcher's store, which its ranks inherit


class UnknownHost(UserError):
    """The host of rank 0 does not resolve on this node.  Rank 0 cannot report it."""


class RankStore:
    """The store of this attempt, or `store`, which the ranks already share."""

    def __init__(self, info: RankInfo, store: "dist.Store | None" = None) -> None:  # type: ignore[name-defined]
        self.persistent = open_store(info) if store is None else store  # a launcher's store outlives its ranks
        if store is None:
            if was_launched():
                self.persistent.set(joined_key(info.rank), "")
            if info.rank == 0:
                self.persistent.delete_key(NCCL_DUMP_KEY)  # from an earlier attempt
            # Restarted ranks must not find the addresses of an earlier attempt.
            store = dist.PrefixStore(agree_on_name(self.persistent, info), self.persistent)  # type: ignore[attr-defined]
            info = locate(store, info)
        self.store: Any = store
        self.info = info
        self.is_first: bool | None = None  # to fail, if this rank failed
        self.second: dist.Store | None = None  # type: ignore[name-defined]  # another connection
        self.exit_reporter: ExitReporter = RegisteringReporter(self)

    def is_first_to_fail(self) -> bool:
        """Register a failure; return whether it is the first. Call it before other ranks see a broken connection."""
        if self.is_first is None:
            try:
                self.is_first = self.store.add(FAILURES, 1) == 1
            except RuntimeError:  # rank 0 had the store and is gone, perhaps with its node: one rank per node reports
                self.is_first = self.info.local_rank == (1 if self.info.is_single_node else 0)
        return self.is_first

    def register(self, error: BaseException) -> bool:
        """Register an error; return whether it is the first of all ranks. Restarted ranks read a UserError."""
        is_first = self.is_first_to_fail()
        if is_first and isinstance(error, UserError):
            self.set(USER_ERROR, str(error))
        return is_first

    def require_peers(self) -> None:
        """Raise `PeerFailed` if another rank failed while the ranks connect."""
        if self.has_other_failed():
            self.is_first = False
            raise PeerFailed("another rank failed while the ranks connected; see its output")

    def has_other_failed(self) -> bool:
        """Return whether another rank failed, unless this one did.

        It opens another connection: torch keeps the first one locked while it waits for a key.
        """
        if self.second is None:
            self.second = self.store.clone()
        return self.is_first is None and bool(self.second.check([FAILURES]))

    def set(self, key: str, text: str) -> None:
        """Set a value for this attempt and later ones."""
        self.persistent.set(key, text)

    def get(self, key: str) -> str | None:
        try:
            return self.persistent.get(key).decode() if self.persistent.check([key]) else None
        except RuntimeError:
            return None

    def report(self, report: RankFailureReport) -> None:
        """Store the failure report for the launcher."""
        self.set(FAILURE, msgspec.json.encode(report).decode())

    def run_folder(self) -> Path | None:
        """Return the run's folder, or None if it is not known or this host does not see its lock file."""
        path = self.get(RUN_FOLDER)
        with suppress(OSError):  # not a valid path
            return Path(path) if path and (Path(path) / LOCK).is_file() else None
        return None


class RegisteringReporter(ExitReporter):
    """Registers an error, so that ranks waiting for this one exit."""

    def __init__(self, store: RankStore) -> None:
        super().__init__(store.info.rank)
        self.store = store

    def announce(self, error: BaseException) -> None:
        self.store.register(error)


def agree_on_name(store: "dist.Store", info: RankInfo, timeout_s: float = TIMEOUT_S) -> str:  # type: ignore[name-defined]
    """Return a name for this attempt, which rank 0 chooses.

    Keys of an earlier attempt must not be taken for an answer, and torchrun's restart count differs between hosts (it
    omits restarts that another host caused).  So each rank sends a unique token, which rank 0 answers.

    A rank makes four requests, and rank 0 four for every KEYS_AT_ONCE ranks.  Rank 0 polls, with growing pauses, until
    all ranks have acknowledged: a token may be that of a process that was killed and restarted.
    """
    own = uuid.uuid4().hex
    if info.rank != 0:
        return ask_for_name(store, info.rank, own, timeout_s)
    others = range(1, info.num_ranks)
    hellos, thanks = ([f"{kind}/{rank}" for rank in others] for kind in ("hello", f"thanks/{own}"))
    deadline_s, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
    have_arrived, answered = not others or wait_for_keys(store, hellos, timeout_s), set[str]()
    while have_arrived and others:
        found = [token.decode() for some in batches(hellos) for token in store.multi_get(some)]
        tokens = [token for token in found if token not in answered]
        for some in batches(tokens):
            store.multi_set([f"welcome/{token}" for token in some], [own] * len(some))
        answered.update(tokens)
        if all(store.check(some) for some in batches(thanks)):
            break
        have_arrived = time.monotonic() < deadline_s
        time.sleep(pause_s)  # instead of store.wait, which logs a warning when it times out
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    if not have_arrived:
        awaited = thanks if answered else hellos
        ranks = ", ".join(key.rpartition("/")[2] for key in first_absent(store, awaited, MAX_NAMED))
        raise TimeoutError(
            f"of {info.num_ranks} ranks, {ranks} did not connect within {timeout_s:g} s; see their output"
        )
    return own


def ask_for_name(store: "dist.Store", rank: int, token: str, timeout_s: float) -> str:  # type: ignore[name-defined]
    store.set(f"hello/{rank}", token)
    # Longer than rank 0 waits: rank 0's error names the missing ranks.
    if not wait_for_keys(store, [f"welcome/{token}"], timeout_s + GRACE_S):
        raise TimeoutError(f"rank 0 did not answer within {timeout_s + GRACE_S:g} s; see its output")
    name = str(store.get(f"welcome/{token}").decode())
    store.set(f"thanks/{name}/{rank}", "")
    return name


def wait_for_keys(store: "dist.Store", keys: list[str], timeout_s: float) -> bool:  # type: ignore[name-defined]
    """Wait until all keys are set; return False after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    if not store.has_extended_api():  # a FileStore, whose wait polls too, ends late, and raises a general error
        while not store.check(keys) and time.monotonic() < deadline_s:
            time.sleep(FIRST_PAUSE_S)
        return bool(store.check(keys))
    try:
        for some in batches(keys):
            left_s = deadline_s - time.monotonic()
            store.wait(some, timedelta(seconds=max(left_s, 0.001)))  # 0 would wait forever
    except dist.DistStoreError:
        return False
    return True


def batches(keys: list[str]) -> Iterator[list[str]]:
    return (keys[begin : begin + KEYS_AT_ONCE] for begin in range(0, len(keys), KEYS_AT_ONCE))


def first_absent(store: "dist.Store", keys: Sequence[str], most: int) -> list[str]:  # type: ignore[name-defined]
    """Return the first `most` keys that are not set, by bisection: log2(len(keys)) requests for each."""
    if most < 1 or store.check(list(keys)):
        return []
    if len(keys) == 1:
        return list(keys)
    half = len(keys) // 2
    found = first_absent(store, keys[:half], most)
    return found + first_absent(store, keys[half:], most - len(found))


def gather_via_store(store: "dist.Store", rank: int, ranks: Sequence[int], text: str) -> list[str]:  # type: ignore[name-defined]
    """Return the texts of `ranks`, all of which must call this equally often."""
    turn = store.add(f"gathered-by/{rank}", 1)
    store.set(f"gathered/{turn}/{rank}", text)
    keys = [f"gathered/{turn}/{other}" for other in ranks]
    return get_all(store, keys)


def get_all(store: "dist.Store", keys: list[str]) -> list[str]:  # type: ignore[name-defined]
    """Return the values of the keys, and wait until they are set."""
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
    """Set rank 0's result. If `waits`, wait at most LEAVE_S until the others have read it: the store may be here."""
    with suppress(RuntimeError):  # the process with the store is gone, and all ranks detect that
        store.set(key, text)
        deadline_s = time.monotonic() + LEAVE_S
        while waits and store.add(f"{key}/read", 0) < num_ranks - 1 and time.monotonic() < deadline_s:
            time.sleep(FIRST_PAUSE_S)


def await_end(store: "dist.Store", key: str, timeout_s: float) -> str | None:  # type: ignore[name-defined]
    """Return rank 0's result on the other ranks; None after `timeout_s` or if the store is gone.

    It polls with growing pauses: signal handlers do not run while a rank waits inside torch.
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
    """Complete the local rank and the number of local ranks from the hosts of all ranks, if the launcher did not.

    Every rank sets its host and reads its result; rank 0 makes two more requests for every KEYS_AT_ONCE ranks.
    """
    if info.is_located:
        return info
    store.set(f"host-of/{info.rank}", host_identity())
    if info.rank == 0:
        hosts = get_all(store, [f"host-of/{rank}" for rank in range(info.num_ranks)])
        set_all(store, {f"place-of/{rank}": f"{here} {count}" for rank, (here, count) in enumerate(local_ranks(hosts))})
    local_rank, num_local_ranks = map(int, store.get(f"place-of/{info.rank}").split())
    given = info.local_rank != NOT_KNOWN  # the launcher may choose devices by LOCAL_RANK
    return RankInfo(info.rank, info.num_ranks, info.local_rank if given else local_rank, num_local_ranks)


def find_interface(store: "dist.Store", info: RankInfo) -> str | None:  # type: ignore[name-defined]
    """Return the network interface that leads to the other hosts; None if it cannot be found.

    It is the interface towards rank 0's host. On that host, the name may lead to a loopback address (Debian's
    127.0.1.1) or not resolve: there it is the interface towards another host, which has set its address.
    """
    try:
        host, _ = rendezvous_address(info)
        address = resolve(host)
    except UserError:  # the ranks did not connect through the environment
        return None
    except OSError:
        address = LOOPBACK  # on rank 0's host: the others have resolved the name
    own = address_towards(address)
    if own and not is_loopback(own):
        if info.local_rank == 0:
            store.set(ADDRESS, own)
        return interface_of(own)
    is_reachable = own is not None and host not in (address, "localhost")  # for other hosts
    if not is_reachable or not wait_for_keys(store, [ADDRESS], RESOLVE_S):
        return None
    own = address_towards(store.get(ADDRESS).decode())
    return interface_of(own) if own else None


def local_ranks(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Return the local rank and the number of local ranks of every rank, given their hosts."""
    seen, counts = Counter[str](), Counter(hosts)
    found = []
    for host in hosts:
        found.append((seen[host], counts[host]))
        seen[host] += 1
    return found


def open_store(info: RankInfo) -> "dist.Store":  # type: ignore[name-defined]
    """Open the store of the launcher or of torchrun, or one that rank 0 creates."""
    store = open_any_store(info)
    store.set_timeout(timedelta(seconds=START_UP_TIMEOUT_S))  # NCCL's first collectives wait here for other ranks
    return store


def open_any_store(info: RankInfo) -> "dist.Store":  # type: ignore[name-defined]
    allow_descriptors(SOCKETS_PER_RANK * info.num_ranks)  # the usual limit is 1,024
    if was_launched() and STORE_FILE in os.environ:
        return dist.FileStore(os.environ[STORE_FILE], -1)  # type: ignore[attr-defined]
    if info.num_ranks == 1 and not was_launched():
        return dist.HashStore()  # type: ignore[attr-defined]
    host, port = rendezvous_address(info)
    if was_launched() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return dist.TCPStore(host, port, is_master=False)  # type: ignore[attr-defined]
    # `agree_on_name` waits for the ranks; the server would also count a rank of another launch.
    options: dict[str, Any] = {"is_master": info.rank == 0, "wait_for_workers": False}
    if info.rank == 0:  # by default torch's server listens on all interfaces
        listener = listen_for_ranks(LOOPBACK if info.is_single_node else listen_address(host), port)
        host = listener.getsockname()[0]
        host = LOOPBACK if host == "0.0.0.0" else host  # all interfaces
        options["master_listen_fd"] = listener.detach()
    else:
        host = LOOPBACK if info.is_single_node else await_address(host)
    store = dist.TCPStore(host, port, **options)  # type: ignore[attr-defined]
    require_same_launch(store, info, launch_name())
    return store


def listen_for_ranks(host: str, port: int) -> socket.socket:
    try:
        return listen_on(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise UserError(
            f"port {port} of {platform.node()} is in use, perhaps by another run; set MASTER_PORT to a free port"
        ) from None


def await_address(host: str) -> str:
    """Return the address of rank 0's host. The name of a pod is not known before it runs: then wait for it."""
    patience_s = TIMEOUT_S if "KUBERNETES_SERVICE_HOST" in os.environ else RESOLVE_S
    deadline_s, has_reported = time.monotonic() + patience_s, False
    while True:
        try:
            return resolve(host)
        except OSError as error:
            line = f"the host of rank 0, {host!r}, does not resolve on {platform.node()} ({error.strerror})"
        if time.monotonic() > deadline_s:
            raise UnknownHost(f"{line}; set MASTER_ADDR to its IP address")
        if not has_reported:
            print_line(f"megabatch: {line}; trying again for {patience_s:g} s", to_stderr=True)
            has_reported = True
        time.sleep(LONGEST_PAUSE_S)


def require_same_launch(store: "dist.Store", info: RankInfo, name: str) -> None:  # type: ignore[name-defined]
    """Raise unless the store is that of this launch: another one may have the same host and port."""
    if not name:
        return
    if info.rank == 0:
        store.set(LAUNCH, name)
    elif not wait_for_keys(store, [LAUNCH], TIMEOUT_S):
        raise TimeoutError(f"the store of rank 0 did not answer within {TIMEOUT_S:g} s; see the output of rank 0")
    found = store.get(LAUNCH).decode()
    if found != name:
        raise UserError(
            f"this rank belongs to {name}, but the port of its rank 0 to {found}; set MASTER_PORT to a free port"
        )
