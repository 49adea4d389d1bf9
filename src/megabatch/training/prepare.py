"""From a recipe to a run that is ready to train, in the ranks that exist: connect, share the cores, load the images,
assemble, warm up."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import Struct
from torch import nn

from megabatch.comm.api import distribute, gradient_of
from megabatch.comm.settings import CommSettings
from megabatch.config.schema import RunConfig
from megabatch.data.catalog import load_data_set
from megabatch.data.pipeline.images import DataSet
from megabatch.data.pipeline.normalise import PixelStatistics
from megabatch.errors import UserError
from megabatch.models.catalog import ModelSettings, check_logits, model_errors
from megabatch.planning.pipeline import RecordedBackward
from megabatch.planning.topology import Topology
from megabatch.planning.tuning import Tuning
from megabatch.ranks.backends import Backend
from megabatch.ranks.collectives import digest
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.machine import fair_threads, host_identity, usable_cores
from megabatch.ranks.store import RankStore
from megabatch.ranks.world import World, choose_device, connect
from megabatch.telemetry.activity import Activity
from megabatch.training.build import NOTHING, Own, assemble, never
from megabatch.training.checkpoint.resume import has_checkpoint, stored_pixels, stored_tuning
from megabatch.training.device import wait_for
from megabatch.training.numerics import arithmetic, compile_errors, compile_network, fix_workspace
from megabatch.training.parts import Parts, Training
from megabatch.training.step_metrics import StepMetrics

# What a run does before its first step: passes on real images, whose results are discarded.
#
# The first ones find what is wrong with a model before anything is written, and record when gradients appear; that,
# and what is measured of the links, decides how gradients are fused and all-reduced.  The last one lets DDP settle
# its buckets: it makes them again after its first backward, and where a gradient lies in its bucket can decide how
# its sum is rounded.  So fresh and resumed runs alike take their first step on the final buckets.


def warm_up(parts: Parts, model: ModelSettings, comm: CommSettings, stored: Tuning | None = None) -> Training:
    """Gradients are all-reduced as was chosen before (`stored`), or as is chosen here.  All ranks call it."""
    images, labels = parts.images.microbatch(0, parts.plan.microbatches_of(parts.world.rank)[0])
    warm_up_pass = WarmUpPass(settings=model, images=images, labels=labels, parts=parts)
    backward = record_backward(warm_up_pass, parts.world)
    distributed, gradients = distribute(parts.network, parts.world, comm, backward, stored)
    if model.compile:
        compile_network(parts, distributed)
    with compile_errors() if model.compile else nullcontext():
        warm_up_pass.run(distributed)
    return Training(
        **{part.name: getattr(parts, part.name) for part in fields(parts)},
        model=distributed,
        gradients=gradients,
        metrics=StepMetrics(gradients, parts.statistics, parts.world, parts.update_dtype),
    )


@dataclass(frozen=True, kw_only=True)
class WarmUpPass:
    settings: ModelSettings
    images: torch.Tensor
    labels: torch.Tensor
    parts: Parts

    def run(self, model: nn.Module) -> "Moments":
        """Forward and backward.  Gradients stay, BatchNorm's statistics do not."""
        device = self.parts.world.device
        buffers = [buffer.clone() for buffer in model.buffers()]
        began = now(device)
        loss = self.forward(model)
        backward_began = now(device)
        loss.backward()
        ended = now(device)
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
        return Moments(began, backward_began, ended)

    def forward(self, model: nn.Module) -> torch.Tensor:
        """The loss."""
        with model_errors(self.settings, self.images.shape):
            logits = model(self.parts.normalise(self.images))
        check_logits(self.settings, logits, (len(self.labels), len(self.parts.data.class_names)))
        return self.parts.summed_loss(logits, self.labels.to(logits.device))


class Moments(NamedTuple):
    """Of a warm-up pass; `seconds_between` two of them."""

    began: Any
    backward_began: Any
    ended: Any


def record_backward(warm_up_pass: WarmUpPass, world: World) -> RecordedBackward:
    """When each gradient appears, on the rank on which it is last.  All ranks call it."""
    model, settings = warm_up_pass.parts.network, warm_up_pass.settings
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for _ in range(1 if world.num_ranks == 1 else 2):  # what is not recorded has warmed up
        with recording(parameters) as moments:
            began = warm_up_pass.run(model).backward_began
    unused = [name for name in parameters if name not in moments]
    if unused:
        raise UserError(
            f"model.name={settings.name!r}: no gradient reaches {', '.join(unused[:3])}"
            f"{' ...' * (len(unused) > 3)}; remove what forward does not use, or set requires_grad to False"
        )
    wait_for(world.device)
    ready_s = {name: seconds_between(began, moment) for name, moment in moments.items()}
    require_same_gradients(ready_s, world)
    names: list[str] = json.loads(world.broadcast_text(json.dumps(list(ready_s))))  # rank 0's order, as DDP takes it
    gradients = [gradient_of(parameters[name]) for name in names]
    for parameter in parameters.values():
        parameter.grad = None
    return RecordedBackward(names, gradients, world.all_reduce_max([ready_s[name] for name in names]))


def require_same_gradients(names: Iterable[str], world: World) -> None:
    difference = world.first_difference(json.dumps(sorted(names)))
    if difference:
        first, other = (set(json.loads(text)) for text in (difference.of_rank_0, difference.of_rank))
        name = min(first ^ other)
        having, lacking = (0, difference.rank) if name in first else (difference.rank, 0)
        raise UserError(
            f"{name} has a gradient on rank {having} and none on rank {lacking}; "
            "all ranks must train the same parameters"
        )


@contextmanager
def recording(parameters: dict[str, nn.Parameter]) -> Iterator[dict[str, Any]]:
    """By name, when each gradient appeared; in their order."""
    moments: dict[str, Any] = {}
    names = {parameter: name for name, parameter in parameters.items()}

    def note(parameter: torch.Tensor) -> None:
        moments[names[parameter]] = now(parameter.device)  # type: ignore[index]

    handles = [parameter.register_post_accumulate_grad_hook(note) for parameter in parameters.values()]
    try:
        yield moments
    finally:
        for handle in handles:
            handle.remove()


def now(device: torch.device) -> Any:
    """A moment: on an accelerator, of the current stream."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def seconds_between(began: Any, ended: Any) -> float:
    return float(ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1e3)


class Prepared(NamedTuple):
    config: RunConfig  # with this rank's share of the cores
    training: Training


@contextmanager
def prepare(
    config: RunConfig,
    info: RankInfo,
    store: RankStore | None = None,  # None: the ranks find each other by themselves
    *,
    data: DataSet | None = None,  # instead of the recipe's
    own: Own = NOTHING,
    stop_requested: Callable[[], bool] = never,
    resume: str | None = None,  # what a run has chosen and measured is taken from the one that this resumes, if any
    retune: bool = False,  # but for how gradients are all-reduced
    backend: Backend | None = None,  # that of the device
    topology: Topology | None = None,  # as the ranks say
) -> Iterator[Prepared]:
    device = choose_device(config.run.device)
    found_by = store.store if store else None
    fix_workspace(config.run.deterministic, device)
    activity, last_words = Activity(config.comm.timeout_s), store.last_words if store else None
    with (
        connect(
            info, device, found_by, backend=backend, topology=topology, activity=activity, last_words=last_words
        ) as world,
        store.failures_announced() if store else nullcontext(),
        arithmetic(config.precision, config.run.deterministic),
    ):
        config = share_cores(config, world)
        data = load_data_set(config.data, config.run.decode_threads or 1) if data is None else data
        stored = find_stored(config, resume, world) if resume else Stored()
        tuning = None if retune else stored.tuning
        starting = without_weights(config) if stored.has_checkpoint else config
        is_of_these = stored.pixels is not None and len(stored.pixels.mean) == data.num_channels
        pixels = stored.pixels if is_of_these else None
        yield Prepared(config, ready_to_train(starting, data, world, own, stop_requested, tuning, pixels))


def ready_to_train(
    config: RunConfig,
    data: DataSet,
    world: World,
    own: Own = NOTHING,
    stop_requested: Callable[[], bool] = never,
    stored: Tuning | None = None,
    pixels: PixelStatistics | None = None,
) -> Training:
    return warm_up(assemble(config, data, world, own, stop_requested, pixels), config.model, config.comm, stored)


def share_cores(config: RunConfig, world: World) -> RunConfig:
    """Gives this rank its share of the cores, and says so in the recipe: more threads would fight over them."""
    share = share_of_cores(world)  # all ranks ask, also one whose recipe differs
    threads = config.run.threads or share
    torch.set_num_threads(threads)
    return config.with_run(threads=threads, decode_threads=config.run.decode_threads or threads)


def share_of_cores(world: World) -> int:
    """Of every rank 16 bytes; which cores they may use is told to ranks of the same host alone, where they differ."""
    cores = usable_cores()
    text = json.dumps(sorted(cores))
    found = world.gather_numbers([digest(host_identity()), digest(text)])
    host, _ = found[world.rank]
    here = [rank for rank, (other, _) in enumerate(found) if other == host]
    of_ranks = [("here", cores)] * len(here)
    if len({found[rank][1] for rank in here}) > 1:
        of_ranks = [("here", frozenset(json.loads(each))) for each in world.gather_among(here, text)]
    return fair_threads(here.index(world.rank), of_ranks)


class Stored(Struct, frozen=True):
    """What the run that is resumed has chosen and measured when it began; None if it begins now."""

    tuning: Tuning | None = None
    pixels: PixelStatistics | None = None
    has_checkpoint: bool = False


def find_stored(config: RunConfig, resume: str, world: World) -> Stored:
    """Rank 0 reads it, and all ranks get it."""

    def read() -> Stored:
        return Stored(stored_tuning(config, resume), stored_pixels(config, resume), has_checkpoint(config, resume))

    return world.from_rank_0(read, Stored)


def without_weights(config: RunConfig) -> RunConfig:
    """The weights of a run that resumes come from its checkpoint: the file need not be there any more."""
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, weights=None))
