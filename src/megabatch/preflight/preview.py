"""What a run would be: steps, parameter groups, bytes.  Nothing is started, and nothing is written."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import Struct
from torch import nn
from torch.func import functional_call

from megabatch.config.reference_results import Findings, preflight
from megabatch.config.resolve import make_model, plan_groups, plan_learning_rate, plan_run
from megabatch.config.schema import RunConfig
from megabatch.data.catalog import NoSource, infer_shape
from megabatch.data.sources.shapes import IMAGENET, DataShape
from megabatch.models.catalog import model_errors
from megabatch.models.loss import summed_loss
from megabatch.planning.batch import StepPlan
from megabatch.precision.cast import place_model
from megabatch.precision.master_weights import gradients_of
from megabatch.preflight.count import count_workload, kept_for_backward
from megabatch.simulate.job import Job
from megabatch.simulate.step import AllReduceSettings
from megabatch.simulate.workload import STORED, Workload, load_workload
from megabatch.torch_api import BatchNormBase, FakeTensorMode

ASSUMED_CLASSES = 10  # of images that are not there
ASSUMED_STEPS = 1000  # an epoch of them, by which learning rates can be drawn over epochs


class Memory(Struct, frozen=True, kw_only=True):
    """Bytes on one rank."""

    weights: int  # parameters and buffers of the model
    master_weights: int  # fp32 copies of its 16-bit weights
    gradients: int  # DDP's buckets; the gradients are views of them
    unscaled: int  # fp32 copies of 16-bit gradients
    optimizer: int
    activations: int | None  # what one microbatch keeps for its backward pass; None where it cannot be estimated

    @property
    def total(self) -> int:
        return sum(count or 0 for count in msgspec.structs.astuple(self))


class ParameterRow(Struct, frozen=True, kw_only=True):
    """One parameter, and what the optimizer does with it."""

    name: str
    shape: tuple[int, ...]
    group: str
    weight_decay: float
    trust_ratio: bool


class Preview(Struct, frozen=True, kw_only=True):
    has_images: bool  # else their number and classes are assumed, and so are steps and the size of the last layer
    plan: StepPlan
    learning_rate: Callable[[int], float]
    findings: Findings
    groups: list[dict[str, Any]]
    parameters: list[ParameterRow]
    memory: Memory


def preview(config: RunConfig, num_ranks: int, needs_images: bool = True) -> Preview:
    """Without `needs_images`, also for a source that is not there yet."""
    try:
        shape, has_images = infer_shape(config.data), True
    except NoSource:
        if needs_images:
            raise
        shape, has_images = assumed_shape(config.batch.global_batch), False
    findings = preflight(config, shape.num_train) if has_images else Findings([], [])
    plan = plan_run(config, shape, num_ranks)
    model = make_model(config, shape)
    master_weights = place_model(model, config.precision, torch.device("cpu"), config.model.wants_channels_last)
    groups = plan_groups(config, model)
    trained = list(master_weights.parameters.values())
    image_shape = (shape.num_channels, config.data.image_size, config.data.image_size)
    memory = Memory(
        weights=num_bytes([*model.parameters(), *model.buffers()]),
        master_weights=num_bytes(
            [*master_weights.copies, *(before for _, before in master_weights.originals.values())]
        ),
        gradients=num_bytes(trained),
        unscaled=num_bytes(gradients_of(master_weights.copies)),
        optimizer=num_bytes(master_weights.weights.values()) if config.optim.momentum else 0,
        activations=activation_bytes(config, model, image_shape),
    )
    return Preview(
        has_images=has_images,
        plan=plan,
        learning_rate=plan_learning_rate(config, plan),
        findings=Findings(findings.references, [*shape.warnings, *findings.warnings]),
        groups=groups,
        parameters=list_parameters(model, groups, has_trust_ratio=config.optim.name != "sgd"),
        memory=memory,
    )


def assumed_shape(global_batch: int) -> DataShape:
    """Of photos of which nothing is known yet."""
    samples = ASSUMED_STEPS * global_batch
    return DataShape(num_train=samples, num_test=samples, num_classes=ASSUMED_CLASSES, num_channels=3)


def list_parameters(model: nn.Module, groups: Iterable[dict[str, Any]], has_trust_ratio: bool) -> list[ParameterRow]:
    """Every parameter once, in the model's order; those that are not trained are in no group."""
    group_of = {name: group for group in groups for name in group["param_names"]}
    frozen = {"name": "frozen", "weight_decay": 0.0, "trust_ratio": False}
    return [
        ParameterRow(
            name=name,
            shape=tuple(parameter.shape),
            group=group["name"],
            weight_decay=group["weight_decay"],
            trust_ratio=has_trust_ratio and group["trust_ratio"],
        )
        for name, parameter in model.named_parameters()
        for group in [group_of.get(name, frozen)]
    ]


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def activation_bytes(config: RunConfig, model: nn.Module, image_shape: tuple[int, ...]) -> int | None:
    """Runs one microbatch forward on tensors without content, and adds up what autograd keeps."""
    for module in model.modules():
        if isinstance(module, BatchNormBase) and module.momentum is None:
            module.momentum = 0.1  # the plain average would read its counter, which has no value here
    without_content = FakeTensorMode()  # and not the meta device, where autocast does nothing
    tensors: dict[str, torch.Tensor] = {
        name: without_content.from_tensor(tensor) for name, tensor in model.state_dict(keep_vars=True).items()
    }
    try:
        with (
            without_content,
            model_errors(config.model, (config.batch.microbatch, *image_shape)),
            kept_for_backward(tensors.values()) as kept,
        ):
            images = torch.empty(config.batch.microbatch, *image_shape, dtype=config.precision.formats.model)
            labels = torch.empty(config.batch.microbatch, dtype=torch.int64)
            summed_loss(config.loss, functional_call(model, tensors, (images,)), labels)
    except (RuntimeError, NotImplementedError):  # a forward that looks at values
        return None
    return sum(one.num_bytes for one in kept.values())


# A recipe as the simulator takes it: its workload, batch, length and all-reduce.


class RecipeJob(NamedTuple):
    job: Job
    has_images: bool  # else as many as ImageNet has are assumed


def job_of_recipe(config: RunConfig) -> RecipeJob:
    """Of as many ranks as one likes; the images need not be there."""
    try:
        shape, has_images = infer_shape(config.data), True
    except NoSource:
        shape, has_images = IMAGENET, False
    comm = config.comm
    job = Job(
        name=config.name,
        workload=workload_of(config, shape),
        precision=config.precision.name,
        all_reduce=AllReduceSettings(
            dtype=comm.dtype,
            algorithm=comm.algorithm,
            bucket_mb=None if comm.bucket_mb == "auto" else comm.bucket_mb,
        ),
        global_batch=config.batch.global_batch,
        microbatch=config.batch.microbatch,
        num_train=shape.num_train,
        num_test=shape.num_test,
        epochs=config.train.epochs if config.train.steps is None else None,
        num_steps=config.train.steps,
        evaluate_every=config.train.evaluate_every,
    )
    return RecipeJob(job, has_images)


def workload_of(config: RunConfig, shape: DataShape) -> Workload:
    """The stored one if it is of this very network; else it is counted."""
    model, image_size = config.model, config.data.image_size
    if model.name in STORED and not model.options and not model.freeze and shape.num_channels == IMAGENET.num_channels:
        stored = load_workload(model.name)
        if (stored.image_size, stored.num_classes) == (image_size, shape.num_classes):
            return stored
    return count_workload(model, image_size, shape.num_classes, shape.num_channels)


# How a run of so many ranks is started.

USUAL_GPUS = 8  # of a host, where this one says nothing of the others
# Not --rdzv-backend=c10d, nor --standalone, which takes it: they unpickle what they find at a port.
RENDEZVOUS = "--node-rank=I --master-addr=HOST --master-port=29400"


class Devices(Struct, frozen=True):
    """What this machine has for ranks."""

    kind: str  # cuda or cpu
    count: int  # GPUs, or cores
    is_telling: bool  # of other hosts: not if it merely has no GPU, where the run may be planned and not made

    def can_run(self, num_ranks: int) -> bool:
        return num_ranks <= self.count

    def kind_for(self, num_ranks: int) -> str:
        """What so many ranks would run on."""
        return self.kind if self.is_telling or self.can_run(num_ranks) else "cuda"


def start_commands(arguments: Sequence[str], num_ranks: int, here: Devices) -> list[str]:
    """The lines to paste: here, or where there are as many GPUs, or on several hosts, on each of them.

    Other hosts are taken to be as this one if that is telling; else, up to a usual host, the user fills in how many.
    """
    train = f"megabatch train {shlex.join(arguments)}"
    alone = f"{train} --ranks {num_ranks}"
    if here.can_run(num_ranks):
        return [alone]
    per_host = here.count if here.is_telling else USUAL_GPUS
    fits_one = not here.is_telling and num_ranks <= USUAL_GPUS
    if fits_one or num_ranks % per_host:
        sizes, where = "--nnodes=HOSTS --nproc-per-node=GPUS", f"on each host I = 0, 1, ..., HOSTS x GPUS = {num_ranks}"
    else:
        sizes = f"--nnodes={num_ranks // per_host} --nproc-per-node={per_host}"
        where = f"on each of {num_ranks // per_host} hosts, I = 0, 1, ..."
    several = f"torchrun {sizes} {RENDEZVOUS} -m {train}  # {where}"
    return [f"{alone}  # on a host with {num_ranks} GPUs", several] if fits_one else [several]
