"""Checks that hold on every device: all-reduces, training, resuming, waits of the host, and where CUDA takes memory."""

import contextlib
import hashlib
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.comm.api import distribute
from megabatch.comm.settings import CommSettings
from megabatch.config.loading import load_config
from megabatch.config.schema import RunConfig
from megabatch.data.catalog import load_data_set
from megabatch.data.pipeline.device_decoder import CPU_DECODER, DECODERS
from megabatch.planning.algorithms import ALGORITHMS
from megabatch.planning.plan import COMM_DTYPES, Plan, error_bound
from megabatch.preflight.doctor import take_batches
from megabatch.preflight.selftest.photos import decoded_photos
from megabatch.preflight.selftest.results import Check, CheckJob
from megabatch.ranks.world import World
from megabatch.runs.files import WEIGHTS
from megabatch.runs.records import StepRecord
from megabatch.torch_api import has_context
from megabatch.training.checkpoint.resume import decide_start
from megabatch.training.loop import train
from megabatch.training.numerics import arithmetic
from megabatch.training.parts import Training, never
from megabatch.training.prepare import ready_to_train
from megabatch.training.run import train_and_record

SIZES = (1, 1_000, 300_007)  # elements of the tensors that are all-reduced
IN_16_BITS = 25 << 19  # 25 MiB; only on accelerators: NCCL chooses its algorithm by size
ALL_REDUCED = (1, 1 << 10, 1 << 14, 1 << 18, 1 << 22, 25 << 18, 25 << 20)  # elements of fp32: 4 bytes to 100 MiB
STOPPED_AFTER = 3
STEADY_AFTER, WATCHED_STEPS = 4, 3
# Relative to the CPU's losses: other devices sum products in another order.
TOLERANCE = {"fp32": 2e-3, "fp16": 3e-2, "bf16": 6e-2, "amp": 3e-2}
OPTIMIZERS = {"sgd": "0.1", "lars": "5"}  # with learning rates
# small_resnet, because torch has no deterministic form of small_cnn's last pooling layer on CUDA.
SMALL = ["model.name=small_resnet", "data.synthetic.train=512", "data.synthetic.test=32", "batch.micro=8"]
SMALL += ["train.steps=6"]
SETTLED = ["comm.algorithm=hierarchical", "comm.bucket_mb=25", "run.deterministic=true"]  # no choice depends on timing


def jobs_of_checks(world: World, reference: World) -> list[CheckJob]:
    """Return the checks.  `reference` has the same ranks on their CPUs."""
    jobs = []
    for algorithm in ALGORITHMS:
        for dtype in COMM_DTYPES:
            if world.topology is None or ALGORITHMS[algorithm](world.topology.shape, dtype) is not None:
                settings = CommSettings(algorithm=algorithm, dtype=dtype, timeout_s=60.0)
                name = f"all-reduce {algorithm}, comm dtype {dtype}"
                jobs.append(CheckJob(name, partial(check_sum, world, settings)))
    for count in ALL_REDUCED:
        jobs.append(CheckJob(f"all-reduce of {describe_bytes(4 * count)}", partial(check_equality, world, count)))
    for precision in TOLERANCE:
        for optimizer in OPTIMIZERS:
            run = partial(check_training, world, reference, precision, optimizer)
            jobs.append(CheckJob(f"training {precision}, {optimizer}", run))
    jobs += [CheckJob(f"resume {precision}", partial(check_resume, world, precision)) for precision in ("fp32", "fp16")]
    if world.device.type == "cpu":
        return jobs
    return [
        *jobs,
        CheckJob("no host waits in a step", partial(check_waits, world)),
        CheckJob("CUDA context only on the rank's device, after training", partial(check_contexts, world)),
        CheckJob("CUDA context only on the rank's device, after decoding", partial(check_contexts_of_decoding, world)),
    ]


class Contributions(nn.Module):
    """A model whose gradients are the contributions of the rank."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.zeros(size, device=device) for size in sizes)

    def forward(self, contribution: list[torch.Tensor]) -> torch.Tensor:
        products = [(parameter * tensor).sum() for parameter, tensor in zip(self.tensors, contribution, strict=True)]
        return torch.stack(products).sum()


def contribution_of(rank: int, sizes: Sequence[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator) for size in sizes]


def check_sum(world: World, settings: CommSettings, name: str) -> Sequence[Check]:
    """Compare an all-reduce with the fp64 sum and between ranks."""
    has_large = world.device.type != "cpu" and COMM_DTYPES[settings.dtype].num_bytes == 2
    sizes = (*SIZES, IN_16_BITS) if has_large else SIZES
    model, gradients = distribute(Contributions(sizes, world.device), world, settings)
    with gradients:
        own = [tensor.to(world.device) for tensor in contribution_of(world.rank, sizes)]
        for _ in range(2):  # DDP rebuilds its buckets after the first
            model.zero_grad(set_to_none=True)
            model(own).backward()
        plan = gradients.plan
        sums = gradients_of(model)
    of_bound = worst_of_bound(plan, world.num_ranks, sums)
    num_results = count_different(world, sums)
    return [
        Check(
            name=name,
            passed=of_bound <= 1.0 and num_results == 1,
            found=f"{of_bound:.0%} of the bound, {describe_equality(num_results)}",
            measurements={"plan": str(plan), "of_bound": of_bound, "num_results": num_results},
        )
    ]


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


def count_different(world: World, tensors: list[torch.Tensor]) -> int:
    """Return the number of different results over all ranks."""
    return len(set(world.all_gather(digest_of(tensors))))


def describe_equality(num_results: int) -> str:
    return f"bitwise {'equal' if num_results == 1 else 'DIFFERENT'} on all ranks"


def worst_of_bound(plan: Plan, num_ranks: int, found: Sequence[torch.Tensor]) -> float:
    """Return the largest error of an element as a share of the bound on rounding errors."""
    if num_ranks == 1:
        return 0.0
    exact, magnitudes = ([torch.zeros(each.shape, dtype=torch.float64) for each in found] for _ in range(2))
    for rank in range(num_ranks):
        for place, contribution in enumerate(contribution_of(rank, [len(each) for each in found])):
            exact[place] += contribution
            magnitudes[place] += contribution.abs()
    least = error_bound(plan, num_ranks, 0.0)
    growth = error_bound(plan, num_ranks, 1.0) - least
    worst = [
        (((each.double() - sums).abs()) / (least + magnitude * growth).clamp(min=1e-300))
        .nan_to_num(nan=torch.inf)
        .max()
        for each, sums, magnitude in zip(found, exact, magnitudes, strict=True)
    ]
    return float(max(worst))


class Flat(nn.Module):
    """A model with one parameter, whose gradient is the contribution of the rank."""

    def __init__(self, num_elements: int, world: World) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_elements, device=world.device))
        self.contribution = contribution_of(world.rank, [num_elements])[0].to(world.device)

    def forward(self, contribution: torch.Tensor) -> torch.Tensor:
        return (self.weight * contribution).sum()


def pass_backward(model: DistributedDataParallel) -> None:
    model.zero_grad(set_to_none=False)
    model(model.module.contribution).backward()  # on an accelerator, DDP's forward needs an argument


def check_equality(world: World, num_elements: int, name: str) -> Sequence[Check]:
    """Check that our all-reduce and the backend's are bitwise equal on all ranks.  NCCL chooses algorithms by size."""
    model, gradients = distribute(Flat(num_elements, world), world, CommSettings(timeout_s=60.0))
    with gradients:
        for _ in range(2):
            pass_backward(model)
        ours = count_different(world, gradients_of(model))
        plan = gradients.plans.names
    backend = count_different(world, [world.all_reduce(model.module.contribution).cpu()])
    found = f"{describe_equality(ours)}; of the backend: {describe_equality(backend)}"
    measurements = {"plan": plan, "num_results": ours, "num_results_of_backend": backend}
    return [Check(name=name, passed=ours == backend == 1, found=found, measurements=measurements)]


def describe_bytes(num_bytes: int) -> str:
    units = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
    size, unit = next((size, unit) for size, unit in units if num_bytes >= size)
    return f"{num_bytes // size} {unit}"


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


def check_training(world: World, reference: World, precision: str, optimizer: str, name: str) -> Sequence[Check]:
    """Compare steps on the device with the CPU, and with a second run on the device."""
    settings = [f"optim.name={optimizer}", f"optim.learning_rate={OPTIMIZERS[optimizer]}"]
    settings.append(f"precision.name={precision}")
    first, again = (losses_of(world, *settings) for _ in range(2))
    expected = losses_of(reference, *settings)
    apart = max(abs(one / other - 1) for one, other in zip(first, expected, strict=True))
    repeats = first == again
    return [
        Check(
            name=name,
            passed=apart <= TOLERANCE[precision] and repeats,
            found=f"{apart:.1e} from the CPU, {'reproducible' if repeats else 'NOT reproducible'}",
            measurements={"relative": apart, "repeats": repeats, "losses": first, "losses_on_cpu": expected},
        )
    ]


def check_resume(world: World, precision: str, name: str) -> Sequence[Check]:
    """Compare the final weights of a stopped and resumed run bitwise with those of an uninterrupted run."""
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(world.broadcast_text(folder))
        stopped, whole = ([f"precision.name={precision}", f"run.dir={shared / run}"] for run in ("a", "b"))
        taken: list[int] = []

        def stop() -> bool:
            taken.append(1)
            return len(taken) >= STOPPED_AFTER

        statuses = [record(world, stopped, stop), record(world, stopped), record(world, whole)]
        is_same = True
        if world.rank == 0:
            one, other = (load_file(shared / run / WEIGHTS) for run in ("a", "b"))
            is_same = one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
        is_same = all(world.all_gather(is_same))  # waits until the files are read
    passed = statuses == ["stopped", "finished", "finished"] and is_same
    weights = f"weights bitwise {'equal to' if is_same else 'DIFFERENT from'} an uninterrupted run"
    return [
        Check(
            name=name, passed=passed, found=weights if statuses[0] == "stopped" else f"ended as {', '.join(statuses)}"
        )
    ]


def record(world: World, overrides: list[str], stop_requested: Callable[[], bool] = never) -> str:
    silence = contextlib.redirect_stdout(io.StringIO())
    with begin(world, *overrides, stop_requested=stop_requested) as training, silence:
        config = recipe(world, *overrides)
        return train_and_record(config, decide_start(config, "auto", world), training).status


def check_waits(world: World, name: str) -> Sequence[Check]:
    """Check that the host does not wait for the device in a steady step, as reported by torch."""
    module = torch.get_device_module(world.device)
    settings = ["precision.name=fp16", "run.deterministic=false", "train.steps=100", "train.evaluate_every=0"]
    with begin(world, *settings) as training, contextlib.closing(train(training)) as records:
        for _ in range(STEADY_AFTER):
            next(records)
        module.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(WATCHED_STEPS):
                    next(records)
        finally:
            module.set_sync_debug_mode("default")
    waits = sum("synchroniz" in str(warning.message) for warning in caught)
    found = f"{waits} waits in {WATCHED_STEPS} steps"
    return [Check(name=name, passed=waits == 0, found=found, measurements={"syncs_per_step": waits / WATCHED_STEPS})]


def check_contexts_of_decoding(world: World, name: str) -> Sequence[Check]:
    for decoder in (CPU_DECODER, *DECODERS):
        with decoded_photos(world, decoder) as photos:
            take_batches(photos.stream, 1)
    return check_contexts(world, name)


def check_contexts(world: World, name: str) -> Sequence[Check]:
    """Check that a rank takes memory only on its device.  A context takes 0.3 to 0.6 GB."""
    others = [index for index in range(torch.accelerator.device_count()) if index != world.device.index]
    found = world.all_gather([index for index in others if has_context(index)])
    wrong = [rank for rank, devices in enumerate(found) if devices]
    devices = ", ".join(map(str, found[wrong[0]])) if wrong else ""
    where = f"rank {wrong[0]} also has one on device {devices}" if wrong else "no other device of this host is in use"
    return [Check(name=name, passed=not wrong, found=where, measurements={"other_devices": found})]
