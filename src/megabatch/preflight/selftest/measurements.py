"""Measurements, without pass or fail: steps, precisions, JPEG input; all-reduces beside stock DDP and the backend.

Both sides of a comparison run in the same ranks and take turns; the median of the rounds is reported.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from megabatch.comm.api import distribute
from megabatch.comm.settings import CommSettings
from megabatch.config.loading import load_config
from megabatch.config.resolve import make_model
from megabatch.config.schema import RunConfig
from megabatch.data.catalog import load_data_set
from megabatch.data.pipeline.batches import Stream
from megabatch.data.pipeline.device_decoder import CPU_DECODER, DECODERS
from megabatch.data.pipeline.images import DataSet, PixelStatistics
from megabatch.data.pipeline.reader import Batch
from megabatch.io.numbers import megabytes, milliseconds
from megabatch.preflight.doctor import again_and_again, take_batches
from megabatch.preflight.selftest.checks import (
    ALL_REDUCED,
    STEADY_AFTER,
    Flat,
    describe_bytes,
    pass_backward,
)
from megabatch.preflight.selftest.photos import BATCH, decoded_photos
from megabatch.preflight.selftest.results import Check, CheckJob
from megabatch.ranks.collectives import all_reduce_often
from megabatch.ranks.machine import host_identity, resident_mb, usable_cores
from megabatch.ranks.world import World
from megabatch.runs.records import StepRecord
from megabatch.training.device import synchronize
from megabatch.training.evaluate import NOT_EVALUATED
from megabatch.training.loop import train, train_on
from megabatch.training.numerics import arithmetic
from megabatch.training.parts import Training
from megabatch.training.prepare import ready_to_train

ROUNDS, ROUNDS_OF_LARGE = 7, 3
REPEATS, REPEATS_OF_LARGE = 100, 5  # of the backend's all-reduce in a round
LARGE = 1 << 22  # elements
COUNTED_STEPS = 3
TIMED_AFTER, TIMED_STEPS = 4, 8  # steps of a precision
STOCK_IMAGES = 2048  # in memory; the set grows with the number of ranks
IN_GRAPHS = 4  # microbatches per step that compare graphs
INPUT_S = 3.0


class Workload(NamedTuple):
    """A network of usual size on a GPU; on a CPU one that trains quickly."""

    model: list[str]
    microbatch: int  # of the comparison with stock DDP
    microbatches: tuple[int, ...]
    precisions: tuple[str, ...]
    compiled: str = "fp16"


ON_GPU = Workload(
    ["model.name=resnet50", "data.image_size=224"],
    64,
    (64, 128, 256),
    ("fp32", "tf32", "fp16", "amp", "amp-bf16", "bf16"),
)
ON_CPU = Workload(
    ["model.name=small_resnet", "data.image_size=28", "data.synthetic.channels=1"],
    32,
    (4, 8, 16),
    ("fp32", "bf16", "amp-bf16"),
    compiled="fp32",
)


def jobs_of_measurements(world: World) -> list[CheckJob]:
    on_cpu = world.device.type == "cpu"
    workload = ON_CPU if on_cpu else ON_GPU
    jobs = [
        CheckJob(
            f"all-reduce of {describe_bytes(4 * count)} in backward",
            partial(time_all_reduce, world, count),
            is_measurement=True,
        )
        for count in ALL_REDUCED
    ]
    jobs.append(CheckJob("steps compared with stock DDP", partial(time_steps, world, workload), is_measurement=True))
    speeds: dict[str, float] = {}
    for microbatch in workload.microbatches:
        for precision in workload.precisions:
            run = partial(time_precision, world, workload, [f"precision.name={precision}"], microbatch, speeds)
            jobs.append(CheckJob(f"{precision}, microbatch {microbatch}", run, is_measurement=True))
        run = partial(time_graphs, world, workload, microbatch, speeds)
        jobs.append(CheckJob(f"{workload.compiled} in CUDA graphs, microbatch {microbatch}", run, is_measurement=True))
    for decoder in [CPU_DECODER, *(() if on_cpu else DECODERS)]:
        on_device = "" if decoder == CPU_DECODER else f", decoded by {decoder}"
        run = partial(time_jpegs, world, speeds, decoder)
        jobs.append(CheckJob(f"JPEG input{on_device}", run, is_measurement=True))
    for microbatch in workload.microbatches[: 1 if on_cpu else None]:
        settings = [f"precision.name={workload.compiled}", "model.compile=true"]
        run = partial(time_precision, world, workload, settings, microbatch, speeds)
        jobs.append(CheckJob(f"{workload.compiled} compiled, microbatch {microbatch}", run, is_measurement=True))
    jobs.append(CheckJob("memory", partial(measure_memory, world)))
    return jobs


def seconds_of(world: World, action: Callable[[], object]) -> float:
    """Return the time of the action on the slowest rank."""
    synchronize(world.device)
    world.barrier()
    start_s = time.perf_counter()
    action()
    synchronize(world.device)
    return float(max(world.all_gather(time.perf_counter() - start_s)))


def in_turns(world: World, arms: Mapping[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Return the median seconds of each arm."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 2):  # two warm-up rounds: DDP rebuilds its buckets after the first backward
        for name in sorted(arms, reverse=turn % 2 == 1):
            times[name].append(seconds_of(world, arms[name]))
    return {name: statistics.median(taken[2:]) for name, taken in times.items()}


def time_all_reduce(world: World, num_elements: int, name: str) -> Sequence[Check]:
    """Time forward and backward of one layer with its all-reduce, ours and stock DDP's, and the backend's all-reduce.

    As in nccl-tests, the backend runs many times before the host waits once.
    """
    ours, gradients = distribute(Flat(num_elements, world), world, CommSettings(timeout_s=60.0))
    stock = DistributedDataParallel(Flat(num_elements, world), gradient_as_bucket_view=True)
    rounds, repeats = (ROUNDS_OF_LARGE, REPEATS_OF_LARGE) if num_elements >= LARGE else (ROUNDS, REPEATS)
    with gradients:
        arms: dict[str, Callable[[], object]] = {
            "ours": partial(pass_backward, ours),
            "stock_ddp": partial(pass_backward, stock),
            "backend": partial(all_reduce_often, torch.zeros_like(ours.module.contribution), repeats),
        }
        taken_s = in_turns(world, arms, rounds)
        plan = gradients.plans.names
    taken_s["backend"] /= repeats
    sent = 2 * (world.num_ranks - 1) / world.num_ranks * 4 * num_elements  # as nccl-tests counts
    bus_gb_per_s = sent / taken_s["backend"] / 1e9
    measurements = {"num_bytes": 4 * num_elements, "plan": plan, "backend_bus_gb_per_s": bus_gb_per_s}
    measurements |= {f"{arm}_s": seconds for arm, seconds in taken_s.items()}
    found = f"{milliseconds(taken_s['ours'])}, stock DDP {milliseconds(taken_s['stock_ddp'])}, "
    found += f"backend by itself {milliseconds(taken_s['backend'])} ({bus_gb_per_s:.3g} GB/s)"
    return [Check(name=name, passed=None, found=found, measurements=measurements)]


def configure(workload: Workload, world: World, microbatch: int, accumulation: int = 1, *overrides: str) -> RunConfig:
    global_batch = microbatch * accumulation * world.num_ranks
    sizes = [f"batch.micro={microbatch}", f"batch.global={global_batch}"]
    data = [f"data.synthetic.train={max(2048, 2 * global_batch)}", "data.synthetic.test=8", "data.crop_padding=0"]
    return load_config("smoke", [*workload.model, *data, *sizes, "train.epochs=1000", *overrides])


def time_steps(world: World, workload: Workload, name: str) -> Sequence[Check]:
    config = configure(workload, world, workload.microbatch)
    data = load_data_set(config.data)
    stock = stock_steps(config, data, world)
    with closing(our_steps(config, data, world)) as ours:
        for _ in range(STEADY_AFTER):
            next(ours), next(stock)
        taken_s = in_turns(world, {"ours": lambda: next(ours), "stock_ddp": lambda: next(stock)})
        launches = None if world.device.type == "cpu" else count_launches(ours)
    images_per_s = {arm: config.batch.global_batch / seconds for arm, seconds in taken_s.items()}
    measurements: dict[str, Any] = {f"{arm}_images_per_s": value for arm, value in images_per_s.items()}
    found = f"{images_per_s['ours']:,.0f} images/s, stock DDP {images_per_s['stock_ddp']:,.0f}"
    if launches is not None:
        measurements["launches_per_step"] = launches
        found += f"; {launches:,.0f} launches per step"
    name = f"steps of {config.model.name}, {config.batch.microbatch} images per rank"
    return [Check(name=name, passed=None, found=found, measurements=measurements)]


def our_steps(config: RunConfig, data: DataSet, world: World) -> Generator[StepRecord, None, None]:
    training: Training = ready_to_train(config, data, world)
    with training.gradients, arithmetic(config.precision, config.run.deterministic):
        for record in train(dataclasses.replace(training, evaluate=lambda: NOT_EVALUATED)):
            if isinstance(record, StepRecord):
                yield record


def stock_steps(config: RunConfig, data: DataSet, world: World) -> Iterator[None]:
    """Run stock DDP with its best settings on images in memory, copied asynchronously."""
    model = make_model(config, data.shape).to(world.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, fused=True)
    samples = np.arange(min(len(data.train), STOCK_IMAGES))
    pixels, all_labels = data.train.read(samples), data.train.labels
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


def count_launches(steps: Iterator[Any]) -> float:
    """Count the kernel launches of a steady step."""
    with torch.profiler.profile() as profile:
        for _ in range(COUNTED_STEPS):
            next(steps)
    launches: int = sum(event.count for event in profile.key_averages() if "LaunchKernel" in event.key)
    return launches / COUNTED_STEPS


def time_precision(
    world: World, workload: Workload, settings: Sequence[str], microbatch: int, speeds: dict[str, float], name: str
) -> Sequence[Check]:
    per_s = images_per_second(world, configure(workload, world, microbatch, 1, *settings))
    speeds[name] = per_s
    found = f"{per_s:,.0f} images/s, {per_s / world.num_ranks:,.0f} per rank"
    return [Check(name=name, passed=None, found=found, measurements={"images_per_s": per_s})]


def time_graphs(
    world: World, workload: Workload, microbatch: int, speeds: dict[str, float], name: str
) -> Sequence[Check]:
    """Compare steps of several microbatches with and without graphs."""
    precision = f"precision.name={workload.compiled}"
    eager, graphs = (
        images_per_second(
            world, configure(workload, world, microbatch, IN_GRAPHS, precision, f"model.cuda_graphs={on}")
        )
        for on in ("false", "true")
    )
    speeds[name] = graphs
    found = f"{graphs:,.0f} images/s, without {eager:,.0f} ({IN_GRAPHS} microbatches per step)"
    return [Check(name=name, passed=None, found=found, measurements={"images_per_s": graphs, "without_per_s": eager})]


def images_per_second(world: World, config: RunConfig) -> float:
    """Return the speed of steps on one microbatch that is on the device already, over all ranks."""
    data = load_data_set(config.data)
    pixels = PixelStatistics((127.0,) * data.num_channels, (64.0,) * data.num_channels)  # to measure them takes longer
    training = ready_to_train(config, data, world, pixels=pixels)
    plan = training.plan
    images, labels = training.images.microbatch(0, plan.microbatches_of(world.rank)[0])
    on_device = Batch(images.to(world.device), labels.to(world.device))
    training = dataclasses.replace(training, evaluate=lambda: NOT_EVALUATED, learning_rate=lambda step: 0.0)
    with (
        training.gradients,
        arithmetic(config.precision, config.run.deterministic),
        closing(train_on(Stream(again_and_again(on_device)), training, 0)) as steps,
    ):
        for _ in range(TIMED_AFTER):
            next(steps)

        def several() -> None:
            for _ in range(TIMED_STEPS):
                next(steps)

        taken_s = seconds_of(world, several)
    return TIMED_STEPS * plan.global_batch / taken_s


def time_jpegs(world: World, speeds: dict[str, float], decoder: str, name: str) -> Sequence[Check]:
    """Measure how fast the ranks of this job decode photos, and how many cores the fastest training needs."""
    with decoded_photos(world, decoder) as photos:
        take_batches(photos.stream, photos.num_ahead)  # prefetched ones
        world.barrier()
        began_s, count = time.perf_counter(), 0
        while time.perf_counter() - began_s < INPUT_S:
            take_batches(photos.stream, 1)
            count += BATCH
        synchronize(world.device)
        own = [count / (time.perf_counter() - began_s), photos.num_threads]
        per_s, num_threads = (sum(values) for values in zip(*world.all_gather(own), strict=True))
    cores = {(host, core) for host, own in world.all_gather((host_identity(), sorted(usable_cores()))) for core in own}
    per_core, fastest = per_s / min(num_threads, len(cores)), max(speeds.values(), default=0.0)
    measurements = {"images_per_s": per_s, "threads": num_threads, "per_core": per_core, "mean_kb": photos.mean_kb}
    measurements |= {"cores": len(cores), "cores_needed": fastest / per_core}
    found = f"{per_s:,.0f} images/s of {photos.mean_kb:.0f} KB, {per_core:,.0f} per core with {num_threads:g} threads "
    found += f"on {len(cores)} cores; the fastest step above needs {measurements['cores_needed']:,.0f} cores"
    return [Check(name=name, passed=None, found=found, measurements=measurements)]


def measure_memory(world: World, name: str) -> Sequence[Check]:
    if world.device.type == "cpu":
        found_mb = resident_mb() or 0.0
        found = f"{megabytes(found_mb)} of rank 0"
        return [Check(name=name, passed=None, found=found, measurements={"resident_mb": found_mb})]
    free, total = torch.cuda.mem_get_info(world.device)
    others = total - free - torch.accelerator.memory_reserved(world.device)
    own_mb = [torch.accelerator.max_memory_allocated(world.device) / 1e6, others / 1e6]
    peaks_mb, others_mb = (list(values) for values in zip(*world.all_gather(own_mb), strict=True))
    found = f"{megabytes(max(peaks_mb))} peak of tensors; contexts, libraries and NCCL {megabytes(max(others_mb))}"
    return [Check(name=name, passed=None, found=found, measurements={"device_mb": peaks_mb, "others_mb": others_mb})]
