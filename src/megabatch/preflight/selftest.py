"""The whole self-test on one rank."""

import contextlib
import dataclasses
import hashlib
import io
import itertools
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from msgspec import Struct, field
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch import __version__
from megabatch.comm.api import distribute
from megabatch.comm.settings import CommSettings
from megabatch.config.loading import load_config
from megabatch.config.resolve import make_model
from megabatch.config.schema import RunConfig
from megabatch.data.catalog import load_data_set
from megabatch.data.pipeline.images import DataSet
from megabatch.planning.algorithms import ALGORITHMS
from megabatch.planning.plan import COMM_DTYPES, Plan, error_bound
from megabatch.planning.topology import Topology, regular
from megabatch.ranks.backends import BACKENDS, Backend
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.machine import cpu_name, resident_mb
from megabatch.ranks.store import RankStore
from megabatch.ranks.world import World, connect
from megabatch.runs.files import WEIGHTS
from megabatch.runs.records import StepRecord
from megabatch.training.build import never
from megabatch.training.evaluate import NOT_EVALUATED
from megabatch.training.loop import train
from megabatch.training.numerics import arithmetic, fix_workspace
from megabatch.training.parts import Training
from megabatch.training.prepare import ready_to_train
from megabatch.training.run import train_and_record

# What a self-test reports: one row for each law or figure.


class Check(Struct, frozen=True, kw_only=True):
    name: str
    passed: bool | None  # None: a figure, which nothing is asked of
    found: str  # for people
    figures: dict[str, Any] = field(default_factory=dict)


class Report(Struct, frozen=True, kw_only=True):
    """What is sent back.  It holds no names of hosts, users, paths or data."""

    megabatch: str
    torch: str
    device: str  # its name
    backend: str
    num_ranks: int
    hosts_of: list[int]  # ranks, as the plans were given them
    seconds: float = 0.0
    checks: list[Check] = []

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.passed is False]


Note = Callable[[Check], None]  # hears of each check, on rank 0

# Laws that hold on every device: sums are right and the same on all ranks; training is that of the CPU to rounding,
# and repeats itself; a run that is stopped and resumed ends with the bits of one that was not.

SIZES = (1, 1_000, 300_007)  # elements of the tensors that are all-reduced
STEPS, STOPPED_AFTER = 6, 3
# How far the losses of a device may lie from the CPU's: products are summed in another order.
TOLERANCE = {"fp32": 2e-3, "fp16": 3e-2, "bf16": 6e-2, "amp": 3e-2}
SMALL = ["data.synthetic.train=512", "data.synthetic.test=32", "batch.micro=8", f"train.steps={STEPS}"]
SETTLED = ["comm.algorithm=hierarchical", "comm.bucket_mb=25", "run.deterministic=true"]  # nothing is chosen by timing


class Contributions(nn.Module):
    """Its gradients are what each rank brings."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.zeros(size, device=device) for size in SIZES)

    def forward(self, brought: list[torch.Tensor]) -> torch.Tensor:
        products = [(parameter * tensor).sum() for parameter, tensor in zip(self.tensors, brought, strict=True)]
        return torch.stack(products).sum()


def brought_by(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator) for size in SIZES]


def check_sums(world: World) -> Iterator[Check]:
    """Every plan that applies, in every dtype that travels."""
    for name in ALGORITHMS:
        for dtype in COMM_DTYPES:
            settings = CommSettings(algorithm=name, dtype=dtype, timeout_s=60.0)
            with contextlib.suppress(NotApplicable):
                yield check_sum(world, settings, f"all-reduce {name}, {dtype} travels")


class NotApplicable(Exception):
    pass


def check_sum(world: World, settings: CommSettings, name: str) -> Check:
    if world.topology and ALGORITHMS[settings.algorithm](world.topology.shape, settings.dtype) is None:
        raise NotApplicable
    model, gradients = distribute(Contributions(world.device), world, settings)
    with gradients:
        for _ in range(2):  # DDP makes its buckets again after the first
            model.zero_grad(set_to_none=True)
            model([tensor.to(world.device) for tensor in brought_by(world.rank)]).backward()
        plan = gradients.plan
        sums = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    of_bound = max(worst_of_bound(plan, world.num_ranks, index, tensor) for index, tensor in enumerate(sums))
    hashes = set(world.all_gather(digest_of(sums)))
    return Check(
        name=name,
        passed=of_bound <= 1.0 and len(hashes) == 1,
        found=f"{of_bound:.0%} of the bound, {'same' if len(hashes) == 1 else 'OTHER'} bits on all ranks",
        figures={"plan": str(plan), "of_bound": of_bound, "num_results": len(hashes)},
    )


def worst_of_bound(plan: Plan, num_ranks: int, index: int, found: torch.Tensor) -> float:
    """The largest error of an element, as a part of what rounding may come to."""
    all_brought = torch.stack([brought_by(rank)[index] for rank in range(num_ranks)]).double()
    least = error_bound(plan, num_ranks, 0.0)
    bounds = least + all_brought.abs().sum(0) * (error_bound(plan, num_ranks, 1.0) - least)
    errors = (found.double() - all_brought.sum(0)).abs()
    return float((errors / bounds.clamp(min=1e-300)).nan_to_num(nan=torch.inf).max()) if num_ranks > 1 else 0.0


def digest_of(tensors: list[torch.Tensor]) -> str:
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(tensor.contiguous().numpy().tobytes())
    return content.hexdigest()


def recipe(world: World, *overrides: str) -> RunConfig:
    global_batch = f"batch.global={16 * world.num_ranks}"
    return load_config("smoke", [*SMALL, *SETTLED, global_batch, *overrides])


@contextlib.contextmanager
def begin(world: World, *overrides: str, stop_requested: Callable[[], bool] = never) -> Iterator[Training]:
    config = recipe(world, *overrides)
    with arithmetic(config.precision, config.run.deterministic):
        training = ready_to_train(config, load_data_set(config.data), world, stop_requested=stop_requested)
        with training.gradients:
            yield training


def losses_of(world: World, *overrides: str) -> list[float]:
    with begin(world, *overrides) as training:
        return [record.loss for record in train(training) if isinstance(record, StepRecord)]


def check_training(world: World, reference: World) -> Iterator[Check]:
    """The same steps on the device and on the CPU, and twice on the device."""
    for precision, tolerance in TOLERANCE.items():
        for optimizer, rate in (("sgd", "0.1"), ("lars", "5")):
            overrides = [f"precision.name={precision}", f"optim.name={optimizer}", f"optim.learning_rate={rate}"]
            first, again = (losses_of(world, *overrides) for _ in range(2))
            expected = losses_of(reference, *overrides)
            apart = max(abs(one / other - 1) for one, other in zip(first, expected, strict=True))
            repeats = first == again
            yield Check(
                name=f"training {precision}, {optimizer}",
                passed=apart <= tolerance and repeats,
                found=f"{apart:.1e} from the CPU, {'repeats' if repeats else 'DOES NOT repeat'} itself",
                figures={"relative": apart, "repeats": repeats, "losses": first, "losses_on_cpu": expected},
            )


def check_resume(world: World) -> Iterator[Check]:
    """Stopped, and resumed from its checkpoint, against not stopped: final weights, to the bit."""
    for precision in ("fp32", "fp16"):
        with tempfile.TemporaryDirectory() as folder:
            shared = Path(world.broadcast_text(folder))
            stopped, whole = ([f"precision.name={precision}", f"run.dir={shared / name}"] for name in ("a", "b"))
            taken: list[int] = []

            def stop(taken: list[int] = taken) -> bool:
                taken.append(1)
                return len(taken) >= STOPPED_AFTER

            statuses = [record(world, stopped, stop), record(world, stopped), record(world, whole)]
            is_same = True
            if world.rank == 0:
                one, other = (load_file(shared / name / WEIGHTS) for name in ("a", "b"))
                is_same = one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
            is_same = all(world.all_gather(is_same))  # nobody leaves before the files were read
        passed = statuses == ["stopped", "finished", "finished"] and is_same
        bits = "same bits" if is_same else "OTHER bits"
        found = f"{bits} as without a stop" if statuses[0] == "stopped" else f"ended as {', '.join(statuses)}"
        yield Check(name=f"resume {precision}", passed=passed, found=found)


def record(world: World, overrides: list[str], stop_requested: Callable[[], bool] = never) -> str:
    silence = contextlib.redirect_stdout(io.StringIO())
    with begin(world, *overrides, stop_requested=stop_requested) as training, silence:
        return train_and_record(recipe(world, *overrides), "auto", training).status


# Figures, of which nothing is asked: waits and launches of a step, all-reduces and steps beside stock DDP, memory.
#
# Both sides live in the same ranks and take turns; the median of the rounds counts.

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
