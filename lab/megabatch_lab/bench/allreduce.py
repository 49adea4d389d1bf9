"""megabatch bench allreduce: an all-reduce (sum, fp32) inside one host, ours against Gloo's and MPICH's.

All arms live in the same ranks, one thread each, and take turns: a block of calls of one, then of the next, the order
turned every round; the first call of a block only warms up.  All ranks leave a barrier, and a call's time is that of
the slowest rank, on every arm; what counts is the median of all calls.  Each arm's sum is checked before.
ours   a tensor that lives in shared memory, as DDP's buckets do: nothing is copied in or out
gloo   torch.distributed.all_reduce of a tensor, over the loopback interface
mpich  MPI_Allreduce in place, of memory from MPI_Alloc_mem, MPI initialised for one thread: of the ways to call it, the
       fastest.  MPIR_CVAR_NOLOCAL=1 in the environment makes it use UCX's shared memory instead of its own: twice as
       fast from 1 MiB on, slower below; rows tell which.  It is measured where mpi4py is installed (then mpiexec
       starts the ranks) and each rank has a core: MPICH polls, and would be timing the scheduler.
limit  the memory's: each rank, all at the same time, reads and writes every byte of a tensor of its own once.  No
       all-reduce can move less: p tensors are read, p are written.  `memory_limit_fraction` is its time by ours.
"""

import importlib.util
import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from megabatch.comm.cpu.shared_memory import SharedMemory
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.machine import usable_cores
from megabatch.ranks.store import RankStore
from megabatch.ranks.world import World, connect
from megabatch.torch_api import default_store
from megabatch_lab.bench.report import print_lines, write

KIB, MIB = 1 << 10, 1 << 20
SIZES = [KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 100 * MIB]
CLASSES = {"up to 256 KiB": (0, 256 * KIB), "1 to 16 MiB": (MIB, 16 * MIB), "100 MiB": (100 * MIB, 100 * MIB)}
BLOCK_BYTES = 16 * MIB  # a block has more calls of small tensors, whose times wander more
MAX_CALLS = 20
MPIEXEC = Path(sys.executable).parent / "mpiexec"


def has_mpi(num_ranks: int) -> bool:
    return importlib.util.find_spec("mpi4py") is not None and MPIEXEC.exists() and num_ranks <= len(usable_cores())


def become_mpiexec(arguments: Sequence[str], num_ranks: int) -> NoReturn:
    """Signals then reach mpiexec, which ends its ranks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_PORT": str(port)}
    command = [str(MPIEXEC), "-n", str(num_ranks), sys.executable, "-P", "-m", "megabatch", *arguments]
    os.execve(MPIEXEC, command, os.environ | settings)


@contextmanager
def mpi(num_ranks: int) -> Iterator[Any]:
    """mpi4py's MPI; None where mpiexec has not started this rank."""
    if "PMI_RANK" not in os.environ or not has_mpi(num_ranks):
        yield None
        return
    import mpi4py

    mpi4py.rc.threads = False  # the least locking
    from mpi4py import MPI

    yield MPI
    MPI.Finalize()


def run_rank(info: RankInfo, store: RankStore, rounds: int, sizes: Sequence[int], json_file: Path | None) -> int:
    """One rank of the bench; rank 0 reports.  Returns the exit code."""
    torch.set_num_threads(1)
    with mpi(info.num_ranks) as mpi_or_none, connect(info, "cpu", store.store) as world:
        store = dist.PrefixStore("bench", default_store())
        with SharedMemory(store, info.rank, info.num_ranks) as memory:
            rows = [measure(size, rounds, world, memory, mpi_or_none) for size in sizes]
        if info.rank == 0:  # before MPI is left: then mpiexec may end, with 0, and this rank with it
            print_lines([line(row) for row in rows])
            print_lines([summary for name, ends in CLASSES.items() for summary in summarise(name, ends, rows)])
            write(rows, json_file)
    return 0


def measure(size: int, rounds: int, world: World, memory: SharedMemory, mpi: Any) -> dict[str, Any]:
    tensors, calls = make_arms(size // 4, memory, mpi)
    for name, call in calls.items():
        tensors[name].fill_(world.rank + 1)
        memory.barrier.wait()
        call()
        expected = world.num_ranks * (world.num_ranks + 1) / 2 if name != "limit" else 2 * (world.rank + 1)
        assert tensors[name].eq(expected).all(), f"{name}: {tensors[name]}, not {expected}"
        tensors[name].zero_()
    num_calls = max(1, min(MAX_CALLS, BLOCK_BYTES // size))
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name] += time_block(calls[name], num_calls, memory)
    medians = {name: slowest_rank(times[name]) for name in names}
    ours = medians["ours"]
    return {
        "bytes": size,
        "ranks": world.num_ranks,
        "calls": rounds * num_calls,
        "ours_s": ours,
        "gloo_s": medians["gloo"],
        "mpich_s": medians.get("mpich"),
        "mpich_memory": ("ucx" if os.environ.get("MPIR_CVAR_NOLOCAL") == "1" else "its own") if mpi else None,
        "gloo_ratio": medians["gloo"] / ours,
        "mpich_ratio": medians["mpich"] / ours if mpi else None,
        "memory_limit_fraction": medians["limit"] / ours,
    }


def make_arms(
    num_elements: int, memory: SharedMemory, mpi: Any
) -> tuple[dict[str, torch.Tensor], dict[str, Callable[[], object]]]:
    tensors = {name: torch.zeros(num_elements) for name in ("ours", "gloo", "limit")}
    shared = memory.share(tensors["ours"])
    array = tensors["limit"].numpy()
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: memory.all_reduce(shared),
        "gloo": lambda: dist.all_reduce(tensors["gloo"]),
        "limit": lambda: np.add(array, array, array),
    }
    if mpi:
        allocated = mpi.Alloc_mem(4 * num_elements)
        tensors["mpich"] = torch.frombuffer(allocated, dtype=torch.float32)
        calls["mpich"] = lambda: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, [allocated, mpi.FLOAT])
    return tensors, calls


def time_block(call: Callable[[], object], num_calls: int, memory: SharedMemory) -> list[float]:
    call()
    times = []
    for _ in range(num_calls):
        memory.barrier.wait()
        started_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - started_s)
    return times


def slowest_rank(times: list[float]) -> float:
    """The median over calls of the time of the slowest rank."""
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def line(row: dict[str, Any]) -> dict[str, str]:
    size = row["bytes"]
    shown = {"size": f"{size // MIB} MiB" if size >= MIB else f"{size / KIB:g} KiB", "ranks": str(row["ranks"])}
    for name in ("ours", "gloo", "mpich"):
        seconds = row[f"{name}_s"]
        shown[f"{name} us"] = "-" if seconds is None else f"{1e6 * seconds:,.1f}"
    for name in ("gloo", "mpich"):
        ratio = row[f"{name}_ratio"]
        shown[f"{name} / ours"] = "-" if ratio is None else f"{ratio:.2f}"
    return shown | {"of memory's limit": f"{row['memory_limit_fraction']:.2f}"}


def summarise(name: str, ends: tuple[int, int], rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Geometric means over a class of sizes, and the worst of it."""
    chosen = [row for row in rows if ends[0] <= row["bytes"] <= ends[1]]
    if not chosen:
        return []
    summary = {"class": name}
    for peer in ("gloo", "mpich"):
        ratios = [row[f"{peer}_ratio"] for row in chosen]
        if None not in ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            summary |= {f"{peer} / ours": f"{mean:.2f}", f"least, {peer}": f"{min(ratios):.2f}"}
    return [summary]
