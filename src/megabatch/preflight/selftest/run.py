"""The self-test: connects the ranks and runs its checks and measurements."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from megabatch import __version__
from megabatch.planning.topology import Topology, from_hosts, regular
from megabatch.preflight.selftest.checks import jobs_of_checks
from megabatch.preflight.selftest.measurements import jobs_of_measurements
from megabatch.preflight.selftest.results import SelfTest, count_start, run_jobs
from megabatch.ranks.backends import BACKENDS, Backend
from megabatch.ranks.collectives import digest
from megabatch.ranks.devices import installed_driver
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.machine import cpu_name, host_identity
from megabatch.ranks.store import RankStore
from megabatch.ranks.world import World, connect
from megabatch.torch_api import default_backend_class
from megabatch.training.numerics import set_cublas_workspace

TIMEOUT_S = 120.0
BUDGET_S = 420.0  # later measurements are left out


def run_selftest(
    info: RankInfo,
    store: RankStore,
    device_type: str,
    checks_only: bool,
    on_check: Callable[[SelfTest], None],
    backend: Backend | None = None,  # for both devices and CPUs
) -> SelfTest:
    """Run the self-test on all ranks.  Rank 0 calls `on_check` with the results after each check."""
    if info.rank == 0:
        count_start(store)
    set_cublas_workspace(True, device_type)
    with worlds(info, store, device_type, backend or backend_of_both(device_type)) as (world, reference):
        jobs = jobs_of_checks(world, reference)
        if not checks_only:
            jobs += jobs_of_measurements(world)
        newest = describe_world(world, is_simulated=two_nodes(info) is not None)
        for results in run_jobs(jobs, newest, world, store, BUDGET_S):
            newest = results
            if world.rank == 0:
                on_check(newest)
    return newest


def describe_world(world: World, is_simulated: bool) -> SelfTest:
    on_cpu = world.device.type == "cpu"
    topology = world.topology
    return SelfTest(
        megabatch=__version__,
        torch=str(torch.__version__),
        device=cpu_name() if on_cpu else torch.get_device_module(world.device).get_device_name(),
        backend=world.backend.name,
        backend_class=default_backend_class(world.device),
        software={} if on_cpu else software(),
        num_ranks=world.num_ranks,
        hosts_of=[len(node) for node in topology.nodes] if topology else [world.num_ranks],
        is_simulated=is_simulated,
    )


def software() -> dict[str, str]:
    cudnn = None
    with suppress(RuntimeError):  # a cuDNN that does not load; the checks report it
        cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    versions = {
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": cudnn,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None,
        "driver": installed_driver(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
    }
    return {name: str(version) for name, version in versions.items() if version}


def backend_of_both(device_type: str) -> Backend:
    """Return a backend for tensors on CPUs and on devices."""
    kinds = [f"{kind}:{BACKENDS[kind].name}" for kind in ("cpu", device_type)]
    return BACKENDS["cpu"] if device_type == "cpu" else BACKENDS[device_type]._replace(name=",".join(kinds))


@contextmanager
def worlds(info: RankInfo, store: RankStore, device_type: str, backend: Backend) -> Iterator[tuple[World, World]]:
    """Yield two worlds of the same ranks: with their devices and with their CPUs."""
    with connect(info, device_type, store, TIMEOUT_S, backend, two_nodes(info)) as world:
        if world.topology is None:
            world.topology = discover_topology(world)
        if device_type == "cpu":
            yield world, world
            return
        reference = World(info.rank, info.num_ranks, torch.device("cpu"), BACKENDS["cpu"], world.topology)
        with reference.closing:
            yield world, reference


def two_nodes(info: RankInfo) -> Topology | None:
    """Return a topology of two simulated nodes, so that a single machine also tests plans between nodes."""
    is_divisible = info.num_ranks >= 4 and info.num_ranks % 2 == 0
    return regular(2, info.num_ranks // 2) if info.is_single_node and is_divisible else None


def discover_topology(world: World) -> Topology:
    """Return the topology that the hosts of the ranks have."""
    return from_hosts([host for (host,) in world.gather_numbers([digest(host_identity())])])
