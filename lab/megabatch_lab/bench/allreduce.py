"""megabatch bench allreduce: an all-reduce (sum, fp32) on one node, compared with Gloo and MPICH.

All arms run in the same ranks with one thread each.  They take turns: a block of calls of one arm, then of the next,
with a rotated order every round.  The first call of a block is a warm-up.  Every call starts at a barrier and takes as
long as its slowest rank.  The median of all calls is reported.  The result of each arm is checked first.
ours   a tensor in shared memory, like DDP's buckets: nothing is copied in or out
gloo   torch.distributed.all_reduce over the loopback interface
mpich  in-place MPI_Allreduce on memory from MPI_Alloc_mem, with MPI initialised for one thread: the fastest way to call
       it.  MPIR_CVAR_NOLOCAL=1 makes MPICH use UCX's shared memory, which is twice as fast from 1 MiB and slower below.
       Rows record which one was used.  Measured only if mpi4py is installed (mpiexec then starts the ranks) and each
       rank has a core: MPICH polls, so with fewer cores the scheduler would be measured.
limit  memory bandwidth: all ranks at once read and write every byte of a private tensor.  No all-reduce can move less,
       because p tensors are read and p are written.  `memory_limit_fraction` is its time divided by ours.
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
from megabatch_lab.bench.report import in_turns, print_lines, write

KIB, MIB = 1 << 10, 1 << 20
SIZES = [KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 100 * MIB]
CLASSES = {"up to 256 KiB": (0, 256 * KIB), "1 to 16 MiB": (MIB, 16 * MIB), "100 MiB": (100 * MIB, 100 * MIB)}
BLOCK_BYTES = 16 * MIB  # small tensors get more calls per block, because their times vary more
MAX_CALLS = 20
MPIEXEC = Path(sys.executable).parent / "mpiexec"


def has_mpi(num_ranks: int) -> bool:
    return importlib.util.find_spec("mpi4py") is not None and MPIEXEC.exists() and num_ranks <= len(usable_cores())


def become_mpiexec(arguments: Sequence[str], num_ranks: int) -> NoReturn:
    """Replace this process by mpiexec, so that signals reach mpiexec, which ends its ranks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_PORT": str(port)}
    command = [str(MPIEXEC), "-n", str(num_ranks), sys.executable, "-P", "-m", "megabatch", *arguments]
    os.execve(MPIEXEC, command, os.environ | settings)


@contextmanager
def mpi(num_ranks: int) -> Iterator[Any]:
    """Yield mpi4py's MPI, or None if mpiexec did not start this rank."""
    if "PMI_RANK" not in os.environ or not has_mpi(num_ranks):
        yield None
        return
    import mpi4py

    mpi4py.rc.threads = False  # the least locking
    from mpi4py import MPI

    yield MPI
    MPI.Finalize()


def run_rank(info: RankInfo, store: RankStore, rounds: int, sizes: Sequence[int], json_file: Path | None) -> int:
    """Run one rank of the bench and return its exit code.  Rank 0 reports."""
    torch.set_num_threads(1)
    with mpi(info.num_ranks) as mpi_or_none, connect(info, "cpu", store) as world:
        bench_store = dist.PrefixStore("bench", default_store())  # type: ignore[attr-defined]  # torch does not export it
        with SharedMemory(bench_store, info.rank, info.num_ranks) as memory:
            rows = [measure(size, rounds, world, memory, mpi_or_none) for size in sizes]
        if info.rank == 0:  # before MPI.Finalize: mpiexec may exit with 0 after it and end this rank
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
    for name, _ in in_turns(calls, rounds):
        times[name] += time_block(calls[name], num_calls, memory)
    medians = {name: slowest_rank(times[name]) for name in calls}
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
    """Return the median over calls of the slowest rank's time."""
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(statistics.median(slowest.tolist()))


def line(row: dict[str, Any]) -> dict[str, str]:
    size = row["bytes"]
    shown = {"size": f"{size // MIB} MiB" if size >= MIB else f"{size / KIB:g} KiB", "ranks": str(row["ranks"])}
    for name in ("ours", "gloo", "mpich"):
        seconds = row[f"{name}_s"]
        shown[f"{name} us"] = "-" if seconds is None else f"{1e6 * seconds:,.1f}"
    for name in ("gloo", "mpich"):
        ratio = row[f"{name}_ratio"]
        shown[f"{name} / ours"] = "-" if ratio is None else f"{ratio:.2f}"
    return shown | {"memory limit / ours": f"{row['memory_limit_fraction']:.2f}"}


def summarise(name: str, ends: tuple[int, int], rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the geometric means and the smallest ratios over a class of sizes."""
    chosen = [row for row in rows if ends[0] <= row["bytes"] <= ends[1]]
    if not chosen:
        return []
    summary = {"class": name}
    for peer in ("gloo", "mpich"):
        ratios = [row[f"{peer}_ratio"] for row in chosen]
        if None not in ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            summary |= {f"{peer} / ours": f"{mean:.2f}", f"smallest {peer} / ours": f"{min(ratios):.2f}"}
    return [summary]
