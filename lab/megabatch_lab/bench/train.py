"""megabatch bench train: our trainer compared with stock DDP, in images per second.

Both arms run in the same ranks with the same threads, model, images and batch.  They take turns: a block of steps of
one, then of the other, with the order swapped every round.  A block takes as long as its slowest rank (it ends with a
barrier).  `ratio` is the median over rounds of stock's time divided by ours in the same round, because the machine's
speed varies over time.  Our arm writes every row of metrics.jsonl, as `megabatch train` does.  Neither arm evaluates.
`check_percent` is the share of our step spent on detecting inf and NaN in the gradients, summed over calls.  On CPUs it
is thread CPU time, because another thread may use the core meanwhile.  `record_percent` is the share spent on recording
the times of a step.  `noise_percent` is the time that measuring the gradient noise scale adds to a step: the
median over rounds of blocks in which every step is measured, compared with blocks without, divided by
train.noise_every.
"""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

from megabatch.comm.cpu import shared_memory
from megabatch.config.loading import load_config
from megabatch.config.resolve import make_model
from megabatch.config.schema import RunConfig
from megabatch.data.catalog import load_data_set
from megabatch.data.pipeline.images import ArrayImages, DataSet
from megabatch.ranks.devices import choose_device
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.store import RankStore
from megabatch.ranks.world import World, connect
from megabatch.runs.folder import RunFolder
from megabatch.runs.records import StepRecord
from megabatch.telemetry.activity import Activity
from megabatch.training import loop
from megabatch.training.evaluate import NOT_EVALUATED
from megabatch.training.loop import train
from megabatch.training.numerics import arithmetic
from megabatch.training.prepare import now, ready_to_train, seconds_between
from megabatch_lab.bench.report import report
from megabatch_lab.bench.stock_ddp import train_stock

# Overrides of the recipe `fashion`, steps per block, and the share of the requested rounds.
WORKLOADS = {
    "small_resnet": (["model.name=small_resnet"], 4, 1.0),
    "small_cnn": (["model.name=small_cnn"], 4, 1.0),
    "alexnet_like": (
        [
            "model.name=megabatch_lab.bench.train:alexnet_like",
            "data.source=synthetic",
            "data.image_size=64",
            "data.synthetic.train=1024",
            "data.synthetic.test=16",
            "data.synthetic.classes=1000",
            "batch.global=32",
            "batch.micro=16",
            "optim.learning_rate=0.01",
        ],
        1,
        0.3,
    ),
}

# Functions that detect inf and NaN: in a rank's gradients, and in its part of the all-reduced ones.
CHECKS = [(loop, "clip_and_check"), (shared_memory, "product_of_halves")]
# Functions that record the times of activities and compute the times of a row.
RECORDING = [(Activity, "begin"), (loop, "step_times")]

TakeStep = Callable[[], object]


def run_rank(
    info: RankInfo, store: RankStore, device: str, rounds: int, models: Sequence[str], json_file: Path | None
) -> int:
    """Run one rank of the bench and return its exit code.  Rank 0 reports."""
    with connect(info, choose_device(device), store) as world:
        rows = [measure(name, world, rounds) for name in models]
    if info.rank == 0:
        report(rows, json_file)
    return 0


def measure(name: str, world: World, rounds: int) -> dict[str, Any]:
    overrides, steps_per_block, share = WORKLOADS[name]
    return {"model": name} | compare(overrides, steps_per_block, max(3, round(share * rounds)), world)


def compare(overrides: Sequence[str], steps_per_block: int, rounds: int, world: World) -> dict[str, Any]:
    """Measure both arms on the recipe `fashion` with these overrides."""
    config = load_config("fashion", [*overrides, "train.epochs=1000"])
    data = in_memory(load_data_set(config.data))
    with (
        tempfile.TemporaryDirectory() as folder,
        RunFolder(Path(folder)) as run_folder,
        arithmetic(config.precision, config.run.deterministic),
        timed(world.device, CHECKS) as checks,
        timed(world.device, RECORDING) as recording,
    ):
        run_folder.begin(config.to_toml(), {}, 0)
        arms = {"ours": our_steps(config, data, world, run_folder), "stock_ddp": stock_steps(config, data, world)}
        warm_up(arms, steps_per_block)
        checks.clear()
        recording.clear()
        times = time_in_turns(arms, steps_per_block, rounds)
        check_s, record_s = (sum(seconds_between(*call) for call in calls) for calls in (checks, recording))
        noise_share = measure_noise(config, data, world, run_folder, steps_per_block, rounds)
    images = steps_per_block * config.batch.global_batch
    ours, stock = times["ours"], times["stock_ddp"]
    return {
        "ranks": world.num_ranks,
        "threads": torch.get_num_threads(),
        "global_batch": config.batch.global_batch,
        "microbatch": config.batch.microbatch,
        "rounds": rounds,
        "ours_images_per_s": images / statistics.median(ours),
        "stock_ddp_images_per_s": images / statistics.median(stock),
        "ratio": statistics.median(theirs / mine for theirs, mine in zip(stock, ours, strict=True)),
        "check_percent": 100 * check_s / sum(ours),
        "record_percent": 100 * record_s / sum(ours),
        "noise_percent": 100 * noise_share / config.train.noise_every,
    }


def warm_up(arms: dict[str, TakeStep], num_steps: int) -> None:
    for take_step in arms.values():  # DDP rebuilds its buckets, caches warm up
        time_block(take_step, num_steps)


def time_in_turns(arms: dict[str, TakeStep], num_steps: int, rounds: int) -> dict[str, list[float]]:
    """Return the times of blocks of each arm, with the order of arms swapped every round."""
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for turn in range(rounds):
        for arm in sorted(arms, reverse=turn % 2 == 1):
            times[arm].append(time_block(arms[arm], num_steps))
    return times


def measure_noise(
    config: RunConfig, data: DataSet, world: World, folder: RunFolder, num_steps: int, rounds: int
) -> float:
    """Return the time that measuring the noise adds to a step, as a share of a step."""
    arms = {
        name: our_steps(replace(config, train=replace(config.train, noise_every=every)), data, world, folder)
        for name, every in (("with", 1), ("without", 0))
    }
    warm_up(arms, num_steps)
    times = time_in_turns(arms, num_steps, rounds)
    pairs = zip(times["with"], times["without"], strict=True)
    return statistics.median(measured / plain - 1 for measured, plain in pairs)


@contextmanager
def timed(device: torch.device, functions: Sequence[tuple[Any, str]]) -> Iterator[list[tuple[Any, Any]]]:
    """Yield a list that collects the start and end of each call of these functions on this rank."""
    moments = list[tuple[Any, Any]]()
    clock = time.thread_time if device.type == "cpu" else partial(now, device)

    def with_times(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            began = clock()
            found = function(*arguments, **options)
            moments.append((began, clock()))
            return found

        return call

    with ExitStack() as stack:
        for owner, name in functions:
            stack.enter_context(patch.object(owner, name, with_times(getattr(owner, name))))
        yield moments


def time_block(take_step: TakeStep, num_steps: int) -> float:
    dist.barrier()
    started_s = time.perf_counter()
    for _ in range(num_steps):
        take_step()
    dist.barrier()
    return time.perf_counter() - started_s


def in_memory(data: DataSet) -> DataSet:
    """Return the data set with its training images in memory, so that both arms read the same array."""
    train = ArrayImages(data.train.read(np.arange(len(data.train))), data.train.labels)
    return DataSet(train, data.test, data.class_names, data.num_channels)


def our_steps(config: Any, data: DataSet, world: World, folder: RunFolder) -> TakeStep:
    training = dataclasses.replace(ready_to_train(config, data, world), evaluate=lambda: NOT_EVALUATED)
    records = train(training)

    def take_step() -> None:
        record = next(records)
        while not isinstance(record, StepRecord):
            record = next(records)
        if world.rank == 0:
            folder.write(record)

    return take_step


def stock_steps(config: Any, data: DataSet, world: World) -> TakeStep:
    assert isinstance(data.train, ArrayImages)
    losses = train_stock(
        make_model(config, data.shape),
        data.train.images,
        data.train.labels,
        world.device,
        config.batch.global_batch,
        config.batch.microbatch,
        config.optim.learning_rate,
        config.data.crop_padding,
        config.loss.label_smoothing,
    )
    return lambda: next(losses)


def alexnet_like(num_classes: int) -> nn.Sequential:
    """Return a network of 61 million parameters, nearly all in linear layers, with little compute on small images."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
        nn.Linear(256 * 36, 4096),
        nn.ReLU(inplace=True),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Linear(4096, num_classes),
    )
