"""Helpers for tests of the GPU path on the fake CUDA (lab/megabatch_lab/rehearsal)."""

import operator
import subprocess
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megabatch_lab.rehearsal import backends, device_decoder, fake_cuda
from megabatch_lab.rehearsal.backends import MIRRORED, REHEARSED, Collective
from megabatch_lab.rehearsal.fake_cuda import Seen

from megabatch.comm import tune as probe
from megabatch.comm.cpu.shared_memory import SharedMemory
from megabatch.config.loading import load_config
from megabatch.config.schema import RunConfig
from megabatch.data.catalog import load_data_set
from megabatch.planning.topology import Topology, regular
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.store import RankStore
from megabatch.ranks.world import World, connect
from megabatch.runs.records import StepRecord
from megabatch.training.checkpoint.state import restore_training_state, training_state
from megabatch.training.loop import train
from megabatch.training.parts import Training
from megabatch.training.prepare import decoding_in, ready_to_train
from tests.support.rank_pool import Join

# 14 steps of four microbatches of four, with an evaluation after the seventh and the last.
TINY = [
    "model.options.width=4",
    "data.image_size=12",
    "data.synthetic={train=112, test=10, classes=6, channels=3}",
    "batch.global=16",
    "batch.micro=4",
    "train.epochs=2",
    "run.threads=1",
    "comm.bucket_mb=25",
]
STEADY = 13  # DDP times its first ten iterations, and waits for the device to do so


def start() -> None:
    """Prepare a rank: install the fake CUDA and turn off shared memory.

    Only CPUs have shared memory, and both devices must run the same collectives of the same backend.  Links are probed
    only briefly, because they are not real.
    """
    fake_cuda.install()
    device_decoder.register()
    probe.PART_BYTES, probe.ROUNDS = 1 << 14, 1  # type: ignore[attr-defined]
    SharedMemory.is_supported = staticmethod(lambda: False)  # type: ignore[method-assign]


def on(device: str, topology: Topology | None = None) -> Join:
    """Return a function that joins real processes."""
    return partial(join_rehearsed, device, topology)


def join_rehearsed(
    device: str, topology: Topology | None, rank: int, num_ranks: int, store: str
) -> AbstractContextManager[World]:
    info, file = RankInfo(rank, num_ranks, rank, num_ranks), dist.FileStore(store, num_ranks)  # type: ignore[attr-defined]
    return connect(info, device, RankStore(info, file), backend=REHEARSED, topology=topology)


def mirrored(num_ranks: int, ranks_per_node: int = 4, local_rank: int = 0) -> Join:
    """Return a function that joins one process as rank 0 of many, on the device `local_rank`."""
    return partial(join_mirrored, num_ranks, ranks_per_node, local_rank)


def join_mirrored(mirrored_ranks: int, ranks_per_node: int, local_rank: int, *_: Any) -> AbstractContextManager[World]:
    info, topology = (
        RankInfo(0, mirrored_ranks, local_rank, ranks_per_node),
        regular(mirrored_ranks // ranks_per_node, ranks_per_node),
    )
    store = RankStore(info, dist.HashStore())  # type: ignore[attr-defined]
    return connect(info, "cuda", store, backend=MIRRORED, topology=topology)


def alone(*_: Any) -> AbstractContextManager[None]:
    """Join no other process."""
    return nullcontext()


def build_nvml(folder: Path) -> Path:
    """Compile the fake NVML."""
    built = folder / "libnvidia-ml.so.1"
    subprocess.run(
        ["g++", "-std=c++20", "-shared", "-fPIC", str(fake_cuda.HERE / "fake_nvml.cpp"), "-o", str(built)], check=True
    )
    return built


def tiny(*overrides: str) -> RunConfig:
    return load_config("smoke", [*TINY, *overrides])


def tiny_for(num_ranks: int, *overrides: str) -> RunConfig:
    """Return a config for twenty steps, with one microbatch of two images per rank."""
    sizes = (f"batch.global={2 * num_ranks}", "batch.micro=2", f"data.synthetic.train={40 * num_ranks}")
    return tiny(*sizes, "train.epochs=1", "schedule.warmup_epochs=0.5", *overrides)


def begin(config: RunConfig, world: World) -> Training:
    data = load_data_set(config.data)
    world.closing.enter_context(decoding_in(config.run.decode_in, data, world.device.type))
    return ready_to_train(config, data, world)


def state_of(training: Training) -> dict[str, np.ndarray]:
    """Return the state as bytes, so that NaN equals NaN."""
    return {
        name: tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().copy()
        for name, tensor in training_state(training).items()
    }


def train_through(
    world: World, config: RunConfig, stop: int | None = None, scale: float | None = None, lag: int = fake_cuda.LAG
) -> dict[str, Any]:
    """Train, restarting from the saved state after `stop` steps; return the records and the final state."""
    records, first, stored = list[Any](), 0, None
    fake_cuda.reset()
    fake_cuda.set_lag(lag)
    for last in (stop, None) if stop else (None,):
        training = begin(config, world)
        if stored:
            restore_training_state(training, stored)
        elif scale:
            training.loss_scale.value = scale
        for record in train(training, first, is_due=partial(operator.eq, last)):
            if isinstance(record, StepRecord):
                records.append((record.step, record.loss, record.lr, record.loss_scale, record.skipped))
            else:
                records.append((record.step, record.top1, record.test_loss))
            if last and isinstance(record, StepRecord) and record.step == last:
                break
        first = stop or 0
        stored = {name: tensor.cpu().clone() for name, tensor in training_state(training).items()}
    return {"records": records, "state": state_of(training), "hazards": fake_cuda.seen("hazard")}


@dataclass
class SteadyStep:
    """The activity of one step in the middle of a run."""

    launches: dict[str, int]
    waits: list[Seen]
    hazards: list[Seen]
    collectives: list[Collective]
    traced: list[Seen]


def steady_step(world: World, config: RunConfig, number: int = STEADY, traces: bool = False) -> SteadyStep:
    fake_cuda.set_lag(fake_cuda.LAG)
    training = begin(config, world)
    records = train(training)
    for _ in range(number - 1):
        next(records)
    fake_cuda.reset()
    backends.log.clear()
    if traces:
        with fake_cuda.traced() as traced:
            next(records)
    else:
        next(records)
        traced = []
    step = SteadyStep(
        dict(fake_cuda.launches()),
        fake_cuda.seen("sync"),
        fake_cuda.seen("hazard"),
        list(backends.log),
        list(traced),
    )
    records.close()
    return step
