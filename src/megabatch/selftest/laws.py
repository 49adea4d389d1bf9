"""Laws that hold on every device: sums are right and the same on all ranks; training is that of the CPU to rounding,
and repeats itself; a run that is stopped and resumed ends with the bits of one that was not."""

import contextlib
import hashlib
import io
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from megabatch.comm.hook import distribute
from megabatch.comm.settings import CommSettings
from megabatch.config.loading import load_config
from megabatch.config.schema import RunConfig
from megabatch.data.sources import load_data_set
from megabatch.planning.algorithms import ALGORITHMS
from megabatch.planning.plan import COMM_DTYPES, Plan, error_bound
from megabatch.ranks.world import World
from megabatch.runs.files import WEIGHTS
from megabatch.runs.records import StepRecord
from megabatch.selftest.check import Check
from megabatch.train.arithmetic import arithmetic
from megabatch.train.assemble import never
from megabatch.train.loop import train
from megabatch.train.parts import Training
from megabatch.train.prepare import ready_to_train
from megabatch.train.run import train_and_record

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
