"""megabatch bench startup: the start and one step of a single rank out of thousands, without the other ranks.

One process is rank 0 of a mirrored world with 8 ranks per node: every collective returns the result that it would have
if all ranks held the same data (rehearsal/backends.py), on a fake CUDA (rehearsal/fake_cuda.py).  It starts the real
trainer on the recipe `smoke` with LARS.  The bench measures the requests to the network, the GPU and NCCL, not these.
    seconds             from joining the ranks to the first step, without measuring links; of this process only, the
                        median over rounds
    bytes               that this rank sends and receives to agree with the others
    bytes_a_rank        the part of `bytes` that each additional rank adds; the rest does not depend on the ranks
    weights_bytes       DDP's broadcast of the weights, and the gradients of the warm-up pass
    links_mb            traffic that measures links
    communicators       that are connected, which takes NCCL longer the more ranks there are
    splits              communicators that are split off the first one instead
    store_requests      of a rank other than 0
    rank_0_requests     of rank 0 with this number of ranks at a real store (TCPStore), whose keys this process sets;
    rank_0_seconds      each request names all ranks, so its bytes grow with them
    rank_0_store_bytes
    stats_per_node      requests for the state of a file or folder by the ranks of a node, for a cached data set of
                        CLASSES folders
    launches_per_step   of kernels and collectives in a steady step: the maximum over flat, hierarchical and torus in
    syncs_per_step      fp32 and fp16; and how often the host waits for the device
"""

import math
import os
import shutil
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from PIL import Image

from megabatch.comm import api as hook
from megabatch.comm import tune
from megabatch.config.loading import load_config, silent
from megabatch.config.schema import RunConfig
from megabatch.data.catalog import load_data_set
from megabatch.errors import UserError
from megabatch.planning.algorithms import ALGORITHMS
from megabatch.planning.topology import regular
from megabatch.ranks import world
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.store import KEYS_AT_ONCE, RankStore, agree_on_name
from megabatch.ranks.world import World
from megabatch.training.loop import train
from megabatch.training.parts import Training
from megabatch.training.prepare import WarmUpPass, load_once_per_host, prepare
from megabatch_lab.bench.report import report
from megabatch_lab.rehearsal import backends, fake_cuda
from megabatch_lab.rehearsal.counting_store import CountingStore

RANKS_PER_NODE, MICROBATCH = 8, 2
CLASSES = 100
PRECISIONS = ("fp32", "fp16")
STEADY_STEP = 14  # DDP times its first ten steps
AGREEING, WEIGHTS, LINKS = "agreeing", "weights", "links"  # the purpose of bytes


class Start(NamedTuple):
    """The cost of a start."""

    seconds: float
    bytes_for: dict[str, int]
    bytes_a_rank: float
    store_requests: int
    made: dict[str, int]  # process groups


class Span(NamedTuple):
    """One call of a function."""

    places: range  # indices of its collectives in the log
    seconds: float


class Agreement(NamedTuple):
    """The cost of agreeing with the other ranks on a name."""

    seconds: float
    store: CountingStore


class StepCounts(NamedTuple):
    num_launches: int
    num_syncs: int


def read_numbers(text: str) -> list[int]:
    """Parse numbers of ranks such as 8,256,2048."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) and int(word) % RANKS_PER_NODE == 0 for word in words):
        raise UserError(
            f"--ranks {text} must be multiples of {RANKS_PER_NODE} (the ranks of a node), separated by commas: 8,256"
        )
    return [int(word) for word in words]


def run(numbers: list[int], rounds: int, json_file: Path | None) -> None:
    reason = fake_cuda.why_not()
    if reason:
        raise UserError(f"bench startup needs the fake CUDA: {reason}")
    fake_cuda.install()
    with started(config_for(RANKS_PER_NODE), RANKS_PER_NODE):  # imports, which take seconds
        pass
    rows = [measure(num_ranks, rounds) for num_ranks in numbers]
    report(rows, json_file)
    for line in growth(rows):
        print(line)


def measure(num_ranks: int, rounds: int) -> dict[str, Any]:
    rank_0, rank_1 = agree(num_ranks)
    starts = [start(num_ranks) for _ in range(rounds)]
    steps = [steady_step(num_ranks, name, precision) for name in ALGORITHMS for precision in PRECISIONS]
    begun = starts[0]
    return {
        "ranks": num_ranks,
        "seconds": statistics.median(each.seconds for each in starts),
        "bytes": begun.bytes_for[AGREEING] + rank_1.store.num_bytes,
        "bytes_a_rank": begun.bytes_a_rank,
        "weights_bytes": begun.bytes_for[WEIGHTS],
        "links_mb": begun.bytes_for[LINKS] / 1e6,
        "communicators": begun.made["connected"],
        "splits": begun.made["split"],
        "store_requests": rank_1.store.num_requests + begun.store_requests,
        "rank_0_requests": rank_0.store.num_requests + begun.store_requests,
        "rank_0_seconds": rank_0.seconds,
        "rank_0_store_bytes": rank_0.store.num_bytes,
        "stats_per_node": stats_per_node(num_ranks),
        "launches_per_step": max(step.num_launches for step in steps),
        "syncs_per_step": max(step.num_syncs for step in steps),
    }


def growth(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the growth between the last two rows.  Earlier rows may have one node, which does less work."""
    if len(rows) < 2:
        return
    before, last = rows[-2:]
    more = {name: last[name] - before[name] for name in last}
    doublings = math.log2(last["ranks"] / before["ranks"])
    yield f"from {before['ranks']:,} to {last['ranks']:,} ranks"
    for name in ("bytes", "rank_0_store_bytes"):
        yield f"  {name} grow by {more[name] / more['ranks']:,.0f} per rank"
    for name in ("seconds", "rank_0_seconds"):
        yield f"  {name} grow by {more[name] / doublings:.3f} per doubling of the ranks"
    constant = ("communicators", "splits", "store_requests", "rank_0_requests", "stats_per_node")
    for name in (*constant, "launches_per_step", "syncs_per_step"):
        yield f"  {name} " + (f"grow by {more[name]:,}" if more[name] else "are the same")


def config_for(num_ranks: int, *overrides: str) -> RunConfig:
    sizes = [f"batch.micro={MICROBATCH}", f"batch.global={MICROBATCH * num_ranks}", "optim.name=lars"]
    short = [f"train.steps={STEADY_STEP + 2}", "train.evaluate_every=0", "run.threads=1", "run.device=cuda"]
    return load_config("smoke", [*sizes, *short, *overrides], report=silent)


@contextmanager
def started(config: RunConfig, num_ranks: int, store: Any = None) -> Iterator[Training]:
    topology = regular(num_ranks // RANKS_PER_NODE, RANKS_PER_NODE)
    with ExitStack() as stack:
        # A given store keeps `prepare` from waiting for ranks that do not exist.
        info = RankInfo(0, num_ranks, 0, RANKS_PER_NODE)
        rank_store = RankStore(info, store or dist.HashStore())  # type: ignore[attr-defined]
        ready = stack.enter_context(prepare(config, info, rank_store, backend=backends.MIRRORED, topology=topology))
        yield ready.training


def start(num_ranks: int) -> Start:
    """Start once with the recipe's settings, which choose the algorithm."""
    backends.log.clear()
    backends.made.clear()
    spans: dict[str, list[Span]] = {LINKS: [], WEIGHTS: []}
    counting = CountingStore()
    with ExitStack() as stack:
        for kind, owner, name in (
            (LINKS, tune, "probe"),
            (LINKS, tune, "measure"),
            (WEIGHTS, hook, "DistributedDataParallel"),
            (WEIGHTS, WarmUpPass, "run"),
        ):
            stack.enter_context(mock.patch.object(owner, name, attributed(getattr(owner, name), spans[kind])))
        began_s = time.perf_counter()
        with started(config_for(num_ranks), num_ranks, counting):
            seconds = time.perf_counter() - began_s - sum(span.seconds for span in spans[LINKS])
            log, made = list(backends.log), dict(backends.made)
    kind_at = {place: kind for kind, of_kind in spans.items() for span in of_kind for place in span.places}
    bytes_for = dict.fromkeys((AGREEING, WEIGHTS, LINKS), 0)
    bytes_for[AGREEING] = counting.num_bytes
    for place, each in enumerate(log):
        bytes_for[kind_at.get(place, AGREEING)] += each.num_bytes
    gathered = [each for place, each in enumerate(log) if each.op == "allgather" and place not in kind_at]
    bytes_a_rank = sum(each.num_bytes / (each.num_members - 1) for each in gathered)
    return Start(seconds, bytes_for, bytes_a_rank, counting.num_requests, made)


def attributed(function: Callable[..., Any], spans: list[Span]) -> Callable[..., Any]:
    """Wrap a function so that each call appends a span."""

    def call(*args: Any, **named: Any) -> Any:
        first, began_s = len(backends.log), time.perf_counter()
        result = function(*args, **named)
        spans.append(Span(range(first, len(backends.log)), time.perf_counter() - began_s))
        return result

    return call


def steady_step(num_ranks: int, algorithm: str, precision: str) -> StepCounts:
    # Fixed bucket size: otherwise timings would change the number of buckets and of launches.
    choices = [f"comm.algorithm={algorithm}", f"precision.name={precision}", "comm.bucket_mb=25"]
    config = config_for(num_ranks, *choices)
    with started(config, num_ranks) as training, closing(train(training)) as records:
        for _ in range(STEADY_STEP - 1):
            next(records)
        fake_cuda.reset()
        next(records)
        return StepCounts(fake_cuda.launches().total(), len(fake_cuda.seen("sync")))


def stats_per_node(num_ranks: int) -> int:
    """Count the calls of stat by the ranks of a node that load a folder of images: the most of the first and last node.

    The worlds have no process group: loading uses only the store.
    """
    asked, stat, store = 0, os.stat, dist.HashStore()  # type: ignore[attr-defined]

    def counted(path: Any, **options: Any) -> os.stat_result:
        nonlocal asked
        asked += 1
        return stat(path, **options)

    with TemporaryDirectory() as folder, mock.patch.dict(os.environ, XDG_CACHE_HOME=f"{folder}/cache"):
        for number in range(CLASSES):
            path = Path(folder, "set", f"class{number:03d}", "0.png")
            path.parent.mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(path)
            shutil.copyfile(path, path.with_name("1.png"))
        config = load_config(
            "smoke", [f"data.source={folder}/set", "data.image_size=8", "data.validation=0.5"], report=silent
        )
        load_data_set(config.data)  # writes the cache
        nodes, most = regular(num_ranks // RANKS_PER_NODE, RANKS_PER_NODE).nodes, 0
        for node in (nodes[0], nodes[-1]):
            asked = 0
            with (
                mock.patch.object(world, "default_store", lambda: store),
                mock.patch.object(os, "stat", counted),
                ExitStack() as shared,
            ):
                for rank in node:
                    load_once_per_host(config, World(rank, num_ranks, torch.device("cpu")), node, shared)
            most = max(most, asked)
    return most


def agree(num_ranks: int) -> tuple[Agreement, Agreement]:
    """Return the cost for rank 0 and rank 1 at a real store.  One thread stands for all other ranks."""
    server = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # type: ignore[attr-defined]
    stores = [CountingStore(client_of(server)) for _ in range(2)]
    others = range(2, num_ranks)
    words = [uuid.uuid4().hex for _ in others]
    crowd = client_of(server)
    for begin in range(0, len(words), KEYS_AT_ONCE):
        some = slice(begin, begin + KEYS_AT_ONCE)
        crowd.multi_set([f"hello/{rank}" for rank in others[some]], words[some])

    def thank() -> None:
        if words:
            name = crowd.get(f"welcome/{words[-1]}").decode()
            for begin in range(0, len(words), KEYS_AT_ONCE):
                some = others[begin : begin + KEYS_AT_ONCE]
                crowd.multi_set([f"thanks/{name}/{rank}" for rank in some], [""] * len(some))

    def join(rank: int) -> Agreement:
        began_s = time.perf_counter()
        agree_on_name(stores[rank], RankInfo(rank, num_ranks, rank, RANKS_PER_NODE))
        return Agreement(time.perf_counter() - began_s, stores[rank])

    with ThreadPoolExecutor() as threads:
        threads.submit(thank)
        second = threads.submit(join, 1)
        return join(0), second.result()


def client_of(server: Any) -> Any:
    return dist.TCPStore("127.0.0.1", server.port, 1, is_master=False)  # type: ignore[attr-defined]
