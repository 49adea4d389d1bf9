"""Preview a run without starting it: steps, parameter groups, memory, simulator job and commands."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import Struct
from torch import nn
from torch.func import functional_call

from megabatch.config.reference_results import Findings, preflight
from megabatch.config.resolve import make_model, plan_average, plan_groups, plan_learning_rate, plan_run
from megabatch.config.schema import RunConfig
from megabatch.data.catalog import NoSource, infer_shape
from megabatch.data.settings import NUM_VIEWS
from megabatch.data.sources.shapes import IMAGENET, DataShape
from megabatch.models.catalog import model_errors
from megabatch.models.loss import summed_loss
from megabatch.optim.optimizers import TRUST_RATIO, state_bytes
from megabatch.planning.batch import StepPlan
from megabatch.planning.sizes import Stage, plan_stages
from megabatch.precision.cast import place_model
from megabatch.precision.master_weights import gradients_of
from megabatch.preflight.count import count_workload, saved_for_backward
from megabatch.runs.epochs import warn_of_noise
from megabatch.simulate.job import Job
from megabatch.simulate.step import AllReduceSettings
from megabatch.simulate.workload import STORED, Workload, load_workload
from megabatch.torch_api import BatchNormBase, FakeTensorMode, silent_fake_tensors
from megabatch.training.batch_norm import RunningStatistics

ASSUMED_CLASSES = 10  # if the images do not exist
ASSUMED_STEPS = 1000  # per epoch, enough to draw learning rates over epochs


class Memory(Struct, frozen=True, kw_only=True):
    """Bytes on one rank."""

    weights: int  # parameters and buffers of the model
    master_weights: int  # fp32 copies of its 16-bit weights
    gradients: int  # DDP's buckets, of which gradients are views
    unscaled: int  # fp32 copies of 16-bit gradients
    optimizer: int
    average: int  # moving average of weights and statistics
    activations: int | None  # saved by one microbatch for backward; None if unknown

    @property
    def total(self) -> int:
        return sum(count or 0 for count in msgspec.structs.astuple(self))


class ParameterRow(Struct, frozen=True, kw_only=True):
    """A parameter and its optimizer settings."""

    name: str
    shape: tuple[int, ...]
    group: str
    weight_decay: float
    trust_ratio: bool


class StageRow(Struct, frozen=True, kw_only=True):
    """Steps with images of one side, and their activations as in `Memory`."""

    stage: Stage
    epochs: float
    activations: int | None


class Preview(Struct, frozen=True, kw_only=True):
    has_images: bool  # else steps, the size of the last layer and, for the findings, ImageNet are assumed
    plan: StepPlan
    learning_rate: Callable[[float], float]
    findings: Findings
    groups: list[dict[str, Any]]
    parameters: list[ParameterRow]
    memory: Memory  # with the largest images
    stages: list[StageRow]  # one per size of the training images


def preview(config: RunConfig, num_ranks: int, needs_images: bool = True) -> Preview:
    """Return the preview of a run.  Without `needs_images`, the data source need not exist."""
    try:
        shape, has_images = infer_shape(config.data), True
    except NoSource:
        if needs_images:
            raise
        shape, has_images = assumed_shape(config.batch.global_batch), False
    findings = preflight(config, shape.num_train if has_images else IMAGENET.num_train)
    of_noise = warn_of_noise(config.name, config.batch.global_batch, config.batch.microbatch)
    warnings = [*shape.warnings, *findings.warnings, *([of_noise] if of_noise else [])]
    plan = plan_run(config, shape, num_ranks)
    model = make_model(config, shape)
    master_weights = place_model(model, config.precision, torch.device("cpu"), config.model.wants_channels_last)
    groups = plan_groups(config, model)
    trained = list(master_weights.parameters.values())
    stages = plan_stages(config.data.sizes, config.data.image_size, plan.num_steps)
    activations = activations_by_side(config, model, shape.num_channels, [stage.side for stage in stages])
    memory = Memory(
        weights=num_bytes([*model.parameters(), *model.buffers()]),
        master_weights=num_bytes(
            [*master_weights.copies, *(before for _, before in master_weights.originals.values())]
        ),
        gradients=num_bytes(trained),
        unscaled=num_bytes(gradients_of(master_weights.copies)),
        optimizer=state_bytes(master_weights.param_groups(groups), config.optim),
        average=0
        if plan_average(config, plan) is None
        else num_bytes([*master_weights.weights.values(), *RunningStatistics(model, 1).tensors]),
        activations=activations[config.data.image_size],
    )
    return Preview(
        has_images=has_images,
        plan=plan,
        learning_rate=plan_learning_rate(config, plan),
        findings=Findings(findings.references, warnings),
        groups=groups,
        parameters=list_parameters(model, groups, has_trust_ratio=config.optim.name in TRUST_RATIO),
        memory=memory,
        stages=[
            StageRow(stage=stage, epochs=plan.epochs_after(stage.num_steps), activations=activations[stage.side])
            for stage in stages
        ],
    )


def assumed_shape(global_batch: int) -> DataShape:
    """Return a shape for a source that does not exist yet."""
    samples = ASSUMED_STEPS * global_batch
    return DataShape(num_train=samples, num_test=samples, num_classes=ASSUMED_CLASSES, num_channels=3)


def list_parameters(model: nn.Module, groups: Iterable[dict[str, Any]], has_trust_ratio: bool) -> list[ParameterRow]:
    """Return every parameter once, in the model's order.  Frozen parameters are in no group."""
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


def activations_by_side(
    config: RunConfig, model: nn.Module, num_channels: int, sides: Sequence[int]
) -> dict[int, int | None]:
    """Return the activations of a microbatch for images of each side, and of `image_size`.

    The smallest, the largest and that of test images are counted, so a network that refuses one of them raises
    UserError.  The others are between them in proportion to the area.
    """
    least, most = min(sides), config.data.image_size
    wanted = sorted({least, most, config.data.test_side})
    counted = {side: activation_bytes(config, model, (num_channels, side, side)) for side in wanted}
    low, high = counted[least], counted[most]
    if low is None or high is None:
        return dict.fromkeys([*sides, most])
    per_pixel = (high - low) / max(1, most**2 - least**2)
    return {side: round(low + per_pixel * (side**2 - least**2)) for side in [*sides, most]}


def activation_bytes(config: RunConfig, model: nn.Module, image_shape: tuple[int, ...]) -> int | None:
    """Run one microbatch forward on fake tensors and return the bytes that autograd saves."""
    for module in model.modules():
        if isinstance(module, BatchNormBase) and module.momentum is None:
            module.momentum = 0.1  # a cumulative average would read its counter, which has no value here
    fake_mode = FakeTensorMode()  # autocast does nothing on the meta device
    tensors: dict[str, torch.Tensor] = {
        name: fake_mode.from_tensor(tensor) for name, tensor in model.state_dict(keep_vars=True).items()
    }
    try:
        with (
            silent_fake_tensors(),
            fake_mode,
            model_errors(config.model, (config.batch.microbatch, *image_shape)),
            saved_for_backward(tensors.values()) as saved,
        ):
            images = torch.empty(config.batch.microbatch, *image_shape, dtype=config.precision.formats.model)
            labels = torch.empty(config.batch.microbatch, dtype=torch.int64)
            summed_loss(config.loss, functional_call(model, tensors, (images,)), labels)
    except (RuntimeError, NotImplementedError):  # forward depends on values
        return None
    return sum(one.num_bytes for one in saved.values())


class RecipeJob(NamedTuple):
    job: Job
    has_images: bool  # else the size of ImageNet is assumed


def job_of_recipe(config: RunConfig) -> RecipeJob:
    """Return the simulator's job of a recipe, for any number of ranks.  The images need not exist."""
    try:
        shape, has_images = infer_shape(config.data), True
    except NoSource:
        shape, has_images = IMAGENET, False
    comm = config.comm
    has_average = config.train.ema_half_life_epochs > 0  # the weights themselves are evaluated as well
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
        num_test=shape.num_test * NUM_VIEWS[config.data.test_views] * (1 + has_average),
        epochs=config.train.epochs if config.train.steps is None else None,
        num_steps=config.train.steps,
        evaluate_every=config.train.evaluate_every,
        sizes=config.data.sizes,
        test_side=config.data.test_image_size,
    )
    return RecipeJob(job, has_images)


def workload_of(config: RunConfig, shape: DataShape) -> Workload:
    """Return the stored workload of this network, or count it."""
    model, image_size = config.model, config.data.image_size
    if model.name in STORED and not model.options and not model.freeze and shape.num_channels == IMAGENET.num_channels:
        stored = load_workload(model.name)
        if (stored.image_size, stored.num_classes) == (image_size, shape.num_classes):
            return stored
    return count_workload(model, image_size, shape.num_classes, shape.num_channels)


USUAL_GPUS = 8  # per node, if this machine is not typical
# Neither --rdzv-backend=c10d nor --standalone, which uses it: they unpickle data from a port.
RENDEZVOUS = "--node-rank=I --master-addr=HOST --master-port=29400"


class Devices(Struct, frozen=True):
    """The devices of this machine."""

    kind: str  # cuda or cpu
    count: int  # GPUs, or cores
    is_typical: bool  # of the nodes of the run; a machine without GPU may only plan the run

    def can_run(self, num_ranks: int) -> bool:
        return num_ranks <= self.count

    def kind_for(self, num_ranks: int) -> str:
        """Return the device type that `num_ranks` ranks would use."""
        return self.kind if self.is_typical or self.can_run(num_ranks) else "cuda"


def start_commands(arguments: Sequence[str], num_ranks: int, here: Devices) -> list[str]:
    """Return the commands that start a run: on this machine if it fits, else on a larger node or on several nodes.

    Other nodes are assumed to be like this machine if it is typical.  Otherwise they have USUAL_GPUS, or the user fills
    in NODES and GPUS.
    """
    train = f"megabatch train {shlex.join(arguments)}"
    alone = f"{train} --ranks {num_ranks}"
    if here.can_run(num_ranks):
        return [alone]
    per_node = here.count if here.is_typical else USUAL_GPUS
    fits_one = not here.is_typical and num_ranks <= USUAL_GPUS
    if fits_one or num_ranks % per_node:
        sizes, where = "--nnodes=NODES --nproc-per-node=GPUS", f"on each node I = 0, 1, ..., NODES x GPUS = {num_ranks}"
    else:
        sizes = f"--nnodes={num_ranks // per_node} --nproc-per-node={per_node}"
        where = f"on each of {num_ranks // per_node} nodes, I = 0, 1, ..."
    several = f"torchrun {sizes} {RENDEZVOUS} -m {train}  # {where}"
    return [f"{alone}  # on a node with {num_ranks} GPUs", several] if fits_one else [several]
