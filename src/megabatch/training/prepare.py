"""Preparation of a run from its recipe: connect the ranks, share the cores, load images, assemble, warm up."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from megabatch.comm.api import distribute, gradient_of
from megabatch.comm.settings import CommSettings
from megabatch.config.schema import RunConfig
from megabatch.data.catalog import has_index, load_data_set
from megabatch.data.pipeline.decoder_process import DecoderProcess
from megabatch.data.pipeline.device_decoder import require_gpu
from megabatch.data.pipeline.encoded import EncodedImages
from megabatch.data.pipeline.images import DataSet, PixelStatistics, resize_all
from megabatch.data.sources.index import SHARED, Shared
from megabatch.errors import UserError
from megabatch.models.catalog import ModelSettings, check_logits, model_errors
from megabatch.planning.pipeline import RecordedBackward
from megabatch.planning.topology import Topology
from megabatch.planning.tuning import Tuning
from megabatch.ranks.backends import Backend
from megabatch.ranks.collectives import digest
from megabatch.ranks.devices import choose_device
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.machine import fair_threads, host_identity, usable_cores
from megabatch.ranks.store import RankStore
from megabatch.ranks.world import World, connect
from megabatch.telemetry.activity import Activity
from megabatch.text import listed
from megabatch.training.build import NO_OVERRIDES, Overrides, assemble
from megabatch.training.checkpoint.resume import Start, Stored, decide_start, find_stored
from megabatch.training.device import synchronize
from megabatch.training.graphs import make_graph
from megabatch.training.noise import NoiseMeter
from megabatch.training.numerics import arithmetic, compile_errors, compile_network, set_cublas_workspace
from megabatch.training.parts import Parts, Training, never
from megabatch.training.step_metrics import StepMetrics

CORES_TO_LAUNCH = 2  # of a rank with an accelerator: for the thread that launches kernels and for the backend's threads

# Warm-up: passes on real images before the first step.  Their results are discarded.
#
# The first passes report errors of the model before any file is written, and record when each gradient becomes ready.
# These times and the measured links determine how gradients are bucketed and all-reduced.  The last pass lets DDP
# rebuild its buckets, as it does after its first backward.  The position of a gradient in its bucket can affect how its
# sum is rounded, so new and resumed runs must both take their first step on the final buckets.


def warm_up(parts: Parts, model: ModelSettings, comm: CommSettings, stored: Tuning | None = None) -> Training:
    """Run the warm-up passes and choose how gradients are all-reduced, unless `stored` has an earlier choice.

    All ranks call it.
    """
    sides = [stage.side for stage in parts.images.stages]
    index = parts.plan.microbatches_of(parts.world.rank)[0]
    images, labels = parts.images.microbatch(0, index, max(sides))  # the largest decides whether a run fits
    warm_up_pass = WarmUpPass(settings=model, images=images, labels=labels, parts=parts)
    backward = record_backward(warm_up_pass, parts.world)
    for side in {min(sides), parts.card.test_image_size} - {max(sides)}:  # a network may refuse other sizes
        warm_up_pass.resized(side).check(parts.network)
    distributed, gradients = distribute(parts.network, parts.world, comm, backward, stored)
    if model.compile:
        compile_network(parts, distributed)
    with compile_errors() if model.compile else nullcontext():
        warm_up_pass.run(distributed)
    graph = make_graph(parts, images, labels) if model.cuda_graphs else None
    return Training(
        **{part.name: getattr(parts, part.name) for part in fields(parts)},
        model=distributed,
        gradients=gradients,
        metrics=StepMetrics(gradients, parts.statistics, parts.world, parts.update_dtype),
        graph=graph,
        noise=NoiseMeter(
            parts.noise_every, parts.plan, list(parts.master_weights.parameters.values()), gradients, parts.loss_scale
        ),
    )


@dataclass(frozen=True, kw_only=True)
class WarmUpPass:
    settings: ModelSettings
    images: torch.Tensor
    labels: torch.Tensor
    parts: Parts

    def resized(self, side: int) -> "WarmUpPass":
        """Return the pass with the same images at another size."""
        return replace(self, images=resize_all(self.images, (side, side)))

    @torch.no_grad()
    def check(self, model: nn.Module) -> None:
        """Run forward only, which needs little memory.  BatchNorm's statistics are restored."""
        with restoring_buffers(model):
            self.forward(model)

    def run(self, model: nn.Module) -> "Moments":
        """Run forward and backward.  Gradients are left in the model; BatchNorm's statistics are restored."""
        device = self.parts.world.device
        with restoring_buffers(model):
            began = now(device)
            loss = self.forward(model)
            backward_began = now(device)
            loss.backward()
            ended = now(device)
        return Moments(began, backward_began, ended)

    def forward(self, model: nn.Module) -> torch.Tensor:
        """Return the loss."""
        mix = self.parts.mixing(0, 0, *self.images.shape[2:])
        with model_errors(self.settings, self.images.shape):
            logits = model(self.parts.normalise(self.images, mix))
        check_logits(self.settings, logits, (len(self.labels), len(self.parts.data.class_names)))
        return self.parts.summed_loss(logits, self.parts.targets(self.labels, logits, mix))


@contextmanager
def restoring_buffers(model: nn.Module) -> Iterator[None]:
    buffers = [buffer.clone() for buffer in model.buffers()]
    yield
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)


class Moments(NamedTuple):
    """Times or events in a warm-up pass, for `seconds_between`."""

    began: Any
    backward_began: Any
    ended: Any


def record_backward(warm_up_pass: WarmUpPass, world: World) -> RecordedBackward:
    """Record when each gradient is ready on the slowest rank.  All ranks call it."""
    model, settings = warm_up_pass.parts.network, warm_up_pass.settings
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for _ in range(1 if world.num_ranks == 1 else 2):  # the first pass warms up
        with recording(parameters) as moments:
            began = warm_up_pass.run(model).backward_began
    unused = [name for name in parameters if name not in moments]
    if unused:
        raise UserError(
            f"model.name={settings.name!r}: no gradient reaches {listed(unused, 3)}; "
            "remove unused parameters, or set their requires_grad to False"
        )
    synchronize(world.device)
    ready_s = {name: seconds_between(began, moment) for name, moment in moments.items()}
    require_same_gradients(ready_s, world)
    names: list[str] = json.loads(world.broadcast_text(json.dumps(list(ready_s))))  # rank 0's order, as in DDP
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
    """Record the time at which each gradient is ready, by name, in the order of backward."""
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
    """Return the current time; on an accelerator, an event in the current stream."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def seconds_between(began: Any, ended: Any) -> float:
    return float(ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1e3)


class StoppedEarly(Exception):
    """A stop was requested before all ranks were connected: there is nothing to save."""


class Prepared(NamedTuple):
    config: RunConfig  # with this rank's share of the cores
    training: Training
    start: Start | None  # None without `resume`


@contextmanager
def prepare(
    config: RunConfig,
    info: RankInfo,
    store: RankStore | None = None,  # None: the ranks rendezvous through the environment
    *,
    data: DataSet | None = None,  # instead of the recipe's
    overrides: Overrides = NO_OVERRIDES,
    stop_requested: Callable[[], bool] = never,
    resume: str | None = None,  # a resumed run keeps its tuning and pixel statistics
    retune: bool = False,  # choose the tuning again
    backend: Backend | None = None,  # None: the device's default
    topology: Topology | None = None,  # None: as the ranks report it
) -> Iterator[Prepared]:
    device = choose_device(config.run.device)
    require_gpu(config.data.decoder, device)
    set_cublas_workspace(config.run.deterministic, device)

    def require() -> None:
        if stop_requested():
            raise StoppedEarly

    activity = Activity(config.comm.timeout_s)
    with (
        connect(info, device, store, backend=backend, topology=topology, activity=activity, require=require) as world,
        arithmetic(config.precision, config.run.deterministic),
    ):
        config, ranks_here = share_cores(config, world)
        with ExitStack() as shared:
            if data is None:
                data = load_once_per_host(config, world, ranks_here, shared)
            world.closing.enter_context(decoding_in(config.run.decode_in, data, device))
            start = decide_start(config, resume, world) if resume else None
            stored = find_stored(start, world) if start else Stored()
            tuning = None if retune else stored.tuning
            start_config = without_weights(config) if start and start.checkpoint else config
            has_same_channels = stored.pixels is not None and len(stored.pixels.mean) == data.num_channels
            pixels = stored.pixels if has_same_channels else None
            training = ready_to_train(start_config, data, world, overrides, stop_requested, tuning, pixels)
        yield Prepared(config, training, start)


def load_once_per_host(config: RunConfig, world: World, ranks_here: Sequence[int], shared: ExitStack) -> DataSet:
    """Load the data set.  The first rank of a host checks its index, and the others read it from that rank's memory.

    `shared` keeps this memory; close it when all ranks have loaded the data set, for example after a collective.
    """
    is_first = world.rank == ranks_here[0]
    if len(ranks_here) == 1 or not has_index(config.data) or not hasattr(os, "memfd_create"):
        return load_data_set(config.data, config.run.decode_threads or 1)
    arrays = Shared(None if is_first else json.loads(world.from_first(ranks_here, None)))
    shared.callback(arrays.close)
    token = SHARED.set(arrays)
    try:
        return load_data_set(config.data, config.run.decode_threads or 1)
    finally:
        SHARED.reset(token)
        if is_first:
            world.from_first(ranks_here, json.dumps(arrays.offer()))


@contextmanager
def decoding_in(place: str, data: DataSet, device: str) -> Iterator[None]:
    """Decode encoded images in a separate process in this context; with `auto`, only if the device is an accelerator.

    On a CPU a call of torch takes much longer than a launch, and releases the GIL meanwhile.
    """
    encoded = [images for images in (data.train, data.test) if isinstance(images, EncodedImages)]
    is_wanted = place == "process" or (place == "auto" and device != "cpu")
    with DecoderProcess() if encoded and is_wanted else nullcontext() as decoder:
        if decoder:
            decoder.start()  # it imports torch while the rank prepares
        for images in encoded:
            images.decoder = decoder
        try:
            yield
        finally:
            for images in encoded:
                images.decoder = None


def ready_to_train(
    config: RunConfig,
    data: DataSet,
    world: World,
    overrides: Overrides = NO_OVERRIDES,
    stop_requested: Callable[[], bool] = never,
    stored: Tuning | None = None,
    pixels: PixelStatistics | None = None,
) -> Training:
    return warm_up(assemble(config, data, world, overrides, stop_requested, pixels), config.model, config.comm, stored)


def share_cores(config: RunConfig, world: World) -> tuple[RunConfig, list[int]]:
    """Set this rank's number of threads to its share of the cores.

    Returns:
        The recipe with that number, and the ranks of this host.
    """
    share, ranks_here = share_of_cores(world)  # a collective: all ranks call it, even if their recipes differ
    threads = config.run.threads or share
    torch.set_num_threads(threads)
    by_default = threads if world.device.type == "cpu" else max(1, threads - CORES_TO_LAUNCH)
    return config.with_run(threads=threads, decode_threads=config.run.decode_threads or by_default), ranks_here


def share_of_cores(world: World) -> tuple[int, list[int]]:
    """Return the number of cores for this rank, and the ranks of its host.

    Every rank sends 16 bytes.  Only ranks of the same host exchange their lists of cores, and only if those differ.
    """
    cores = usable_cores()
    text = json.dumps(sorted(cores))
    found = world.gather_numbers([digest(host_identity()), digest(text)])
    host, _ = found[world.rank]
    here = [rank for rank, (other, _) in enumerate(found) if other == host]
    of_ranks = [("here", cores)] * len(here)
    if len({found[rank][1] for rank in here}) > 1:
        of_ranks = [("here", frozenset(json.loads(each))) for each in world.gather_among(here, text)]
    return fair_threads(here.index(world.rank), of_ranks), here


def without_weights(config: RunConfig) -> RunConfig:
    """Return the recipe without `model.weights`: a resumed run loads its checkpoint, and the file may be gone."""
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, weights=None))
