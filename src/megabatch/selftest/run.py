"""The whole self-test on one rank."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from msgspec.structs import replace

from megabatch import __version__
from megabatch.planning.topology import Topology, regular
from megabatch.ranks.backends import BACKENDS, Backend
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.machine import cpu_name
from megabatch.ranks.store import RankStore
from megabatch.ranks.world import World, connect
from megabatch.selftest.check import Check, Report
from megabatch.selftest.laws import check_resume, check_sums, check_training
from megabatch.selftest.speed import figures
from megabatch.train.arithmetic import fix_workspace

TIMEOUT_S = 120.0


def run_selftest(
    info: RankInfo,
    store: RankStore,
    device_type: str,
    laws_alone: bool,
    note: Callable[[Report], None],
    backend: Backend | None = None,  # of both the devices and the CPUs
) -> Report:
    """All ranks call it; `note` hears of the report as it grows, on rank 0."""
    began_s = time.perf_counter()
    fix_workspace(True, device_type)
    with worlds(info, store, device_type, backend or backend_of_both(device_type)) as (world, reference):
        report = Report(
            megabatch=__version__,
            torch=str(torch.__version__),
            device=cpu_name() if device_type == "cpu" else torch.get_device_module(world.device).get_device_name(),
            backend=world.backend.name,
            num_ranks=world.num_ranks,
            hosts_of=[len(node) for node in world.topology.nodes] if world.topology else [world.num_ranks],
        )
        checks: Iterator[Check] = itertools.chain(
            check_sums(world), check_training(world, reference), check_resume(world)
        )
        for check in checks if laws_alone else itertools.chain(checks, figures(world)):
            seconds = time.perf_counter() - began_s
            report = replace(report, checks=[*report.checks, check], seconds=seconds)
            if world.rank == 0:
                note(report)
    return report


def backend_of_both(device_type: str) -> Backend:
    """For tensors on CPUs and on devices."""
    kinds = [f"{kind}:{BACKENDS[kind].name}" for kind in ("cpu", device_type)]
    return BACKENDS["cpu"] if device_type == "cpu" else Backend(",".join(kinds), BACKENDS[device_type].join)


@contextmanager
def worlds(info: RankInfo, store: RankStore, device_type: str, backend: Backend) -> Iterator[tuple[World, World]]:
    """The same ranks with their devices, and with their CPUs."""
    topology = two_hosts(info.num_ranks)
    with connect(info, device_type, store.store, TIMEOUT_S, backend, topology) as world, store.failures_announced():
        if device_type == "cpu":
            yield world, world
            return
        reference = World(info.rank, info.num_ranks, torch.device("cpu"), BACKENDS["cpu"], topology)
        with reference.closing:
            yield world, reference


def two_hosts(num_ranks: int) -> Topology | None:
    """Even a single machine tries what plans do between hosts: its ranks are taken for those of two."""
    return regular(2, num_ranks // 2) if num_ranks >= 4 and num_ranks % 2 == 0 else None
