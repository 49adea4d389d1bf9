"""The ranks of `megabatch bench simulator --part here`, which run the tasks of simulated_hosts.py.

As in bench cluster, gradients have the shapes of a model and are all ready at once.  All arms run in the same ranks,
use the same memory and take turns.  A time is that of the slowest rank, and the median of the rounds is reported.  The
task contains the buckets and plans that the simulator chose, so that measurement and prediction agree on them.
"""

import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct

from megabatch.comm.cpu.process_group import ProcessGroup
from megabatch.comm.cpu.workers import Reducer
from megabatch.comm.faults.failure import FirstError
from megabatch.comm.groups import AXES, Groups
from megabatch.comm.tune import SMALL, time_in_node
from megabatch.config.loading import load_config
from megabatch.data.catalog import load_data_set
from megabatch.planning.plan import CommDtype
from megabatch.planning.tuning import Tuning
from megabatch.preflight.profile import record
from megabatch.ranks.discover import RankInfo, discover
from megabatch.ranks.lifecycle import run_as_rank
from megabatch.ranks.store import RankStore
from megabatch.ranks.world import World, connect
from megabatch.runs.folder import RunFolder
from megabatch.simulate.profile import Profile
from megabatch.telemetry.timeline import Timeline
from megabatch.training.prepare import share_cores
from megabatch_lab.bench.cluster import STEPS_PER_BLOCK, TIMEOUT_S, TRAINING, Arm, Ours, bind_to_core, take_turns
from megabatch_lab.bench.gradient_sets import GradientSet
from megabatch_lab.bench.host_ranks import RESULT, TASK
from megabatch_lab.bench.train import in_memory, our_steps, time_block

MICROBATCH = 8  # of TRAINING


class ArmTask(Struct, frozen=True):
    """One all-reduce of all gradients."""

    name: str
    tuning: Tuning
    in_stages: bool = False  # instead of the backend's all-reduce


class AllReduces(Struct, frozen=True, tag=True):
    sizes: list[int]  # elements of each gradient, last layer first
    arms: list[ArmTask]
    rounds: int


class Barriers(Struct, frozen=True, tag=True):
    """Barriers in the shared memory of one host."""


class Steps(Struct, frozen=True, tag=True):
    """Steps of our training, as in bench cluster --train."""

    dtype: CommDtype
    rounds: int


class Recording(Struct, frozen=True, tag=True):
    """A profile of the same training on one rank with a core to itself."""

    seconds: float


Task = AllReduces | Barriers | Steps | Recording


class Measured(Struct, frozen=True):
    taken_s: dict[str, float] = {}  # by arm; for a training step, by dtype
    memory_step_s: float = 0.0
    profile: Profile | None = None


def run_rank(info: RankInfo, store: RankStore, scratch: Path) -> int:
    task = msgspec.json.decode((scratch / TASK).read_bytes(), type=Task)
    if isinstance(task, Steps | Recording):
        bind_to_core(info.local_rank)
    with connect(info, "cpu", store, TIMEOUT_S) as world:
        match task:
            case AllReduces():
                measured = measure_all_reduces(task, world)
            case Barriers():
                measured = measure_barriers(world)
            case Steps():
                measured = measure_steps(task, world)
            case Recording():
                config = load_config("fashion", training(MICROBATCH, "same"))
                measured = Measured(
                    profile=record(share_cores(config, world)[0], world, task.seconds, lambda line: None)
                )
    if info.rank == 0:
        (scratch / RESULT).write_bytes(msgspec.json.encode(measured))
    return 0


def measure_all_reduces(task: AllReduces, world: World) -> Measured:
    gradients = GradientSet(task.sizes)
    with ExitStack() as stack:
        groups = stack.enter_context(closing(Groups(dist.group.WORLD, torch.device("cpu"), TIMEOUT_S)))
        groups.open(AXES)
        arms: dict[str, Arm] = {}
        for arm in task.arms:
            ours = Ours(gradients, groups, lambda reducer, arm=arm: arm.tuning)  # type: ignore[misc]
            stack.callback(ours.close)
            arms[arm.name] = in_stages(ours, groups) if arm.in_stages else ours
        for reduce in arms.values():
            gradients.fill(world.rank)
            dist.barrier()
            reduce()
            gradients.check(world.num_ranks, 1.0)
        taken_s, _ = take_turns(arms, task.rounds, counts=False)
        return Measured(taken_s)


def measure_barriers(world: World) -> Measured:
    with closing(Groups(dist.group.WORLD, torch.device("cpu"), TIMEOUT_S)) as groups:
        groups.open(["node"])
        reducer = Reducer(groups, FirstError(), Timeline())
        taken_s = time_in_node(reducer, "reduce_scatter", SMALL)
        dist.barrier()
        reducer.close()
    return Measured(memory_step_s=taken_s / (world.num_ranks - 1))


def in_stages(ours: Ours, groups: Groups) -> Callable[[], None]:
    group = groups.process_groups["all"]
    assert isinstance(group, ProcessGroup)

    def reduce() -> None:
        group.uses_backend = False
        ours()
        group.uses_backend = True

    return reduce


def measure_steps(task: Steps, world: World) -> Measured:
    config = load_config("fashion", [*training(MICROBATCH * world.num_ranks, task.dtype), "train.epochs=1000"])
    data = in_memory(load_data_set(config.data))
    with tempfile.TemporaryDirectory() as folder, RunFolder(Path(folder)) as run_folder:
        run_folder.begin(config.to_toml(), {}, 0)
        take_step = our_steps(config, data, world, run_folder)
        time_block(take_step, STEPS_PER_BLOCK)  # caches warm up
        blocks_s = [time_block(take_step, STEPS_PER_BLOCK) for _ in range(task.rounds)]
    return Measured({task.dtype: statistics.median(blocks_s) / STEPS_PER_BLOCK})


def training(global_batch: int, dtype: CommDtype) -> list[str]:
    return [*TRAINING, f"batch.global={global_batch}", f"comm.dtype={dtype}"]


if __name__ == "__main__":
    info = discover()
    assert info
    run_as_rank(info, lambda store: run_rank(store.info, store, Path(sys.argv[1])))
