"""Figures, of which nothing is asked: waits and launches of a step, all-reduces and steps beside stock DDP, memory.

Both sides live in the same ranks and take turns; the median of the rounds counts.
"""

import dataclasses
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.comm.hook import distribute
from megabatch.comm.settings import CommSettings
from megabatch.config.loading import load_config
from megabatch.config.resolve import make_model
from megabatch.config.schema import RunConfig
from megabatch.data.images import DataSet
from megabatch.data.sources import load_data_set
from megabatch.ranks.machine import resident_mb
from megabatch.ranks.world import World
from megabatch.runs.records import StepRecord
from megabatch.selftest.check import Check
from megabatch.train.arithmetic import arithmetic
from megabatch.train.evaluate import NOT_EVALUATED
from megabatch.train.loop import train
from megabatch.train.parts import Training
from megabatch.train.prepare import ready_to_train

SIZES_MB = (0.0625, 1, 16, 100)  # of all-reduces, fp32
ROUNDS, STEADY_AFTER, COUNTED_STEPS = 7, 4, 3
# What is trained: on a GPU as large as its users' networks, on a CPU as long as one waits for.
WORKLOADS = {
    "cpu": ["model.name=small_resnet", "data.image_size=28", "data.synthetic.channels=1", "batch.micro=32"],
    "accelerator": ["model.name=resnet50", "data.image_size=224", "batch.micro=64"],
}


class Flat(nn.Module):
    """One parameter of so many elements."""

    def __init__(self, num_elements: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_elements, device=device))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


def workload(world: World) -> RunConfig:
    kind = "cpu" if world.device.type == "cpu" else "accelerator"
    micro = int(WORKLOADS[kind][-1].rpartition("=")[2])
    data = ["data.source=synthetic", "data.synthetic.train=2048", "data.synthetic.test=8", "data.crop_padding=0"]
    return load_config(
        "smoke", [*WORKLOADS[kind], *data, f"batch.global={micro * world.num_ranks}", "train.epochs=1000"]
    )


def synchronize(world: World) -> None:
    if world.device.type != "cpu":
        torch.accelerator.synchronize(world.device)


def seconds_of(world: World, action: Callable[[], object]) -> float:
    """Of the slowest rank."""
    synchronize(world)
    world.all_reduce(torch.zeros(1, device=world.device))
    synchronize(world)
    began_s = time.perf_counter()
    action()
    synchronize(world)
    return float(max(world.all_gather(time.perf_counter() - began_s)))


def pass_backward(model: nn.Module) -> None:
    model().backward()


def in_turns(world: World, arms: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The median seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(ROUNDS + 2):  # the first two warm up: DDP makes its buckets again after the first backward
        for name in sorted(arms, reverse=turn % 2 == 1):
            times[name].append(seconds_of(world, arms[name]))
    return {name: statistics.median(taken[2:]) for name, taken in times.items()}


def time_all_reduces(world: World) -> Iterator[Check]:
    for size_mb in SIZES_MB:
        num_elements = int(size_mb * 2**20 / 4)
        ours, gradients = distribute(Flat(num_elements, world.device), world, CommSettings(timeout_s=60.0))
        stock = DistributedDataParallel(Flat(num_elements, world.device), gradient_as_bucket_view=True)
        with gradients:
            arms = {"ours": partial(pass_backward, ours), "stock_ddp": partial(pass_backward, stock)}
            taken_s = in_turns(world, arms)
            plan = gradients.plans.names
        yield Check(
            name=f"all-reduce of {size_mb:g} MiB in backward",
            passed=None,
            found=f"{1e3 * taken_s['ours']:.2f} ms, stock DDP {1e3 * taken_s['stock_ddp']:.2f} ms",
            figures={"num_bytes": 4 * num_elements, "plan": plan, **{f"{k}_s": v for k, v in taken_s.items()}},
        )


def time_steps(world: World) -> Iterator[Check]:
    config = workload(world)
    data = load_data_set(config.data)
    ours, stock = our_steps(config, data, world), stock_steps(config, data, world)
    for _ in range(STEADY_AFTER):
        next(ours), next(stock)
    taken_s = in_turns(world, {"ours": lambda: next(ours), "stock_ddp": lambda: next(stock)})
    images_per_s = {name: config.batch.global_batch / seconds for name, seconds in taken_s.items()}
    yield Check(
        name=f"steps of {config.model.name}, {config.batch.microbatch} images a rank",
        passed=None,
        found=f"{images_per_s['ours']:,.0f} images/s, stock DDP {images_per_s['stock_ddp']:,.0f}",
        figures={f"{name}_images_per_s": value for name, value in images_per_s.items()},
    )
    yield count_waits(world, ours)
    ours.close()
    yield measure_memory(world)


def our_steps(config: RunConfig, data: DataSet, world: World) -> Generator[StepRecord, None, None]:
    training: Training = ready_to_train(config, data, world)
    with training.gradients, arithmetic(config.precision, config.run.deterministic):
        for record in train(dataclasses.replace(training, evaluate=lambda: NOT_EVALUATED)):
            if isinstance(record, StepRecord):
                yield record


def stock_steps(config: RunConfig, data: DataSet, world: World) -> Iterator[None]:
    """Stock DDP with its best settings, on images in memory as ours are, copied without a wait."""
    model = make_model(config, data.shape).to(world.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, fused=True)
    pixels, all_labels = data.train.read(np.arange(len(data.train))), data.train.labels
    is_pinned = world.device.type != "cpu"
    while True:
        chosen = torch.randint(len(pixels), (config.batch.microbatch,))
        images, labels = pixels[chosen], all_labels[chosen]
        if is_pinned:
            images, labels = (part.pin_memory().to(world.device, non_blocking=True) for part in (images, labels))
        images = images.to(torch.float32, memory_format=torch.channels_last).sub_(127.0).div_(64.0)
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(ddp(images), labels).backward()
        optimizer.step()
        yield


def count_waits(world: World, steps: Iterator[Any]) -> Check:
    """Host waits that torch itself reports, and kernels that it launches, in a steady step."""
    name, module = "waits and launches of a step", torch.get_device_module(world.device)
    if not hasattr(module, "set_sync_debug_mode"):
        for _ in range(COUNTED_STEPS):
            next(steps)
        return Check(name=name, passed=None, found="not counted on this device")
    module.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for _ in range(COUNTED_STEPS):
                next(steps)
    finally:
        module.set_sync_debug_mode("default")
    waits = [str(warning.message) for warning in heard if "synchroniz" in str(warning.message)]
    with torch.profiler.profile() as profile:
        for _ in range(COUNTED_STEPS):
            next(steps)
    launches = sum(event.count for event in profile.key_averages() if "LaunchKernel" in event.key) / COUNTED_STEPS
    return Check(
        name=name,
        passed=not waits,
        found=f"{len(waits) / COUNTED_STEPS:g} waits, {launches:,.0f} launches",
        figures={"syncs_per_step": len(waits) / COUNTED_STEPS, "launches_per_step": launches},
    )


def measure_memory(world: World) -> Check:
    if world.device.type == "cpu":
        found_mb = resident_mb() or 0.0
        return Check(
            name="memory", passed=None, found=f"{found_mb:,.0f} MB of rank 0", figures={"resident_mb": found_mb}
        )
    peak_mb = torch.accelerator.max_memory_allocated(world.device) / 1e6
    return Check(name="memory", passed=None, found=f"{peak_mb:,.0f} MB at most", figures={"device_mb": peak_mb})


def figures(world: World) -> Iterator[Check]:
    return itertools.chain(time_all_reduces(world), time_steps(world))
