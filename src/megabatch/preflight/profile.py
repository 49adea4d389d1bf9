"""Profile one rank on noise images: forward and backward by layer, and the update.

The recipe's microbatch, its half and its quarter are timed in turn, so that other load affects all of them.  Layers
are timed in separate forward passes, since the hooks around each layer slow the others.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from megabatch.comm.layouts import DTYPE_NAMES
from megabatch.comm.tune import measure
from megabatch.config.schema import RunConfig
from megabatch.data.catalog import NoSource, infer_shape, load_data_set
from megabatch.data.pipeline.images import DataSet, PixelStatistics
from megabatch.data.settings import DataSettings, SyntheticSettings
from megabatch.data.sources.shapes import DataShape
from megabatch.errors import UserError
from megabatch.optim.optimizers import set_learning_rate
from megabatch.planning.choosing import all_questions
from megabatch.planning.tuning import Tuning
from megabatch.precision.master_weights import gradients_of
from megabatch.preflight.preview import assumed_shape
from megabatch.ranks.devices import choose_device
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.machine import cpu_name
from megabatch.ranks.store import RankStore
from megabatch.ranks.world import World, connect
from megabatch.simulate.profile import Profile, ProfiledGradient, ProfilePoint
from megabatch.torch_api import foreach_zero_
from megabatch.training.build import assemble
from megabatch.training.device import accelerator_name, synchronize
from megabatch.training.loop import apply_gradients, clip_and_check
from megabatch.training.numerics import arithmetic, set_cublas_workspace
from megabatch.training.parts import Parts
from megabatch.training.prepare import (
    WarmUpPass,
    now,
    prepare,
    record_backward,
    recording,
    seconds_between,
    share_cores,
)

FEWEST_IMAGES = 2  # that BatchNorm can normalise
FEWEST_ROUNDS, MOST_ROUNDS = 3, 200


def noise_like(shape: DataShape, image_size: int) -> DataSet:
    """Return noise images of this shape, for measurements that do not train."""
    noise = SyntheticSettings(train=shape.num_train, test=1, classes=shape.num_classes, channels=shape.num_channels)
    return load_data_set(DataSettings(source="synthetic", image_size=image_size, synthetic=noise))


class Round(NamedTuple):
    """Times of one microbatch, by names of layers and gradients."""

    forward_s: float
    backward_s: float
    ready_s: dict[str, float]  # in the order of backward
    forward_by_layer_s: dict[str, float]


def choose_microbatches(microbatch: int) -> list[int]:
    """Return the microbatches to time, ascending."""
    chosen = sorted({size for size in (microbatch // 4, microbatch // 2, microbatch) if size >= FEWEST_IMAGES})
    if len(chosen) < 2:
        raise UserError(
            f"batch.micro={microbatch}: a profile also times half of it, which must be at least {FEWEST_IMAGES}; "
            f"nearest: batch.micro={2 * FEWEST_IMAGES}"
        )
    return chosen


def record_profile(
    config: RunConfig, info: RankInfo, store: RankStore, seconds: float, report: Callable[[str], None]
) -> Profile:
    device = choose_device(config.run.device)
    set_cublas_workspace(config.run.deterministic, device)
    with (
        connect(info, device, store, config.comm.timeout_s) as world,
        arithmetic(config.precision, config.run.deterministic),
    ):
        return record(share_cores(config, world)[0], world, seconds, report)


def record(config: RunConfig, world: World, seconds: float, report: Callable[[str], None]) -> Profile:
    """Record for `seconds`, but at least three rounds.  `report` is called with the expected duration."""
    if world.num_ranks > 1:
        raise UserError(f"{world.num_ranks} ranks were started, but a profile needs one; start it without a launcher")
    sizes = choose_microbatches(config.batch.microbatch)
    shape = shape_of_images(config)
    data = noise_like(shape, config.data.image_size)
    parts = assemble(config, data, world, pixels=of_noise(shape.num_channels))
    set_learning_rate(parts.optimizer, 0.0)  # the update takes as long as with any other rate
    images, labels = parts.images.microbatch(0, 0)
    passes = [
        WarmUpPass(settings=config.model, images=images[:size], labels=labels[:size], parts=parts) for size in sizes
    ]
    record_backward(passes[-1], world)  # reports errors of the model
    rounds, updates_s = record_rounds(passes, seconds, report)
    names = list(rounds[-1][0].ready_s)
    assert config.run.threads is not None
    return Profile(
        model=config.model.name,
        image_size=config.data.image_size,
        num_classes=shape.num_classes,
        precision=config.precision.name,
        device=cpu_name() if world.device.type == "cpu" else accelerator_name(world.device),
        threads=config.run.threads,
        gradients=list_gradients(parts.network, names),
        points=[medians(size, names, of_size) for size, of_size in zip(sizes, rounds, strict=True)],
        update_s=median(updates_s),
    )


def shape_of_images(config: RunConfig) -> DataShape:
    try:
        return infer_shape(config.data)
    except NoSource:
        return assumed_shape(config.batch.global_batch)


def of_noise(num_channels: int) -> PixelStatistics:
    """Return arbitrary statistics: times do not depend on pixel values."""
    return PixelStatistics((127.5,) * num_channels, (64.0,) * num_channels)


def record_rounds(
    passes: list[WarmUpPass], seconds: float, report: Callable[[str], None]
) -> tuple[list[list[Round]], list[float]]:
    """Return the rounds of each pass and the times of updates."""
    for each in passes:
        time_pass(each)
    began_s = time.perf_counter()  # after warm-up
    rounds, updates_s = [[time_pass(each)] for each in passes], [time_update(passes[-1].parts)]
    round_s = time.perf_counter() - began_s
    num_rounds = min(max(math.ceil(seconds / round_s), FEWEST_ROUNDS), MOST_ROUNDS)
    sizes = ", ".join(str(len(each.labels)) for each in passes)
    report(f"recording microbatches of {sizes} images, {num_rounds} times each: about {num_rounds * round_s:,.0f} s")
    for _ in range(num_rounds - 1):
        for each, of_size in zip(passes, rounds, strict=True):
            of_size.append(time_pass(each))
        updates_s.append(time_update(passes[-1].parts))
    return rounds, updates_s


def time_pass(warm_up_pass: WarmUpPass) -> Round:
    parts = warm_up_pass.parts
    parts.master_weights.clear_gradients(accumulates=False)
    with timing_layers(parts.network, parts.world.device) as spans:
        warm_up_pass.forward(parts.network)
    with recording(dict(parts.network.named_parameters())) as moments:
        began, backward_began, ended = warm_up_pass.run(parts.network)
    synchronize(parts.world.device)
    ready_s = {name: seconds_between(backward_began, moment) for name, moment in moments.items()}
    return Round(
        forward_s=seconds_between(began, backward_began),
        backward_s=seconds_between(backward_began, ended),
        ready_s=ready_s,
        forward_by_layer_s={name: sum(seconds_between(*span) for span in of_layer) for name, of_layer in spans.items()},
    )


@contextmanager
def timing_layers(network: nn.Module, device: torch.device) -> Iterator[dict[str, list[tuple[Any, Any]]]]:
    """Record the start and end of each leaf module by name.  A module that is called twice has two spans."""
    spans: dict[str, list[tuple[Any, Any]]] = {}
    starts: dict[str, Any] = {}

    def begin(name: str) -> None:
        starts[name] = now(device)

    def end(name: str) -> None:
        spans.setdefault(name, []).append((starts[name], now(device)))

    handles = []
    for name, module in network.named_modules():
        if not any(True for _ in module.children()):
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: begin(name)))
            handles.append(module.register_forward_hook(lambda *_, name=name: end(name)))
    try:
        yield spans
    finally:
        for handle in handles:
            handle.remove()


def time_update(parts: Parts) -> float:
    """Time an update with gradients of 0, so that none overflows and no weight changes."""
    foreach_zero_(gradients_of(parts.master_weights.parameters.values()))
    began = now(parts.world.device)
    overflowed = parts.master_weights.load_gradients(parts.loss_scale)
    clip_and_check(parts)
    apply_gradients(parts, overflowed)
    ended = now(parts.world.device)
    synchronize(parts.world.device)
    return seconds_between(began, ended)


def list_gradients(network: nn.Module, names: list[str]) -> list[ProfiledGradient]:
    parameters = dict(network.named_parameters())
    return [
        ProfiledGradient(name=name, num_elements=parameters[name].numel(), dtype=DTYPE_NAMES[parameters[name].dtype])
        for name in names
    ]


def medians(microbatch: int, names: list[str], rounds: list[Round]) -> ProfilePoint:
    """Return the median times; `names` are gradients in the order of the profile."""
    ready_s = [median(one.ready_s[name] for one in rounds) for name in names]
    return ProfilePoint(
        microbatch=microbatch,
        forward_s=median(one.forward_s for one in rounds),
        backward_s=median(one.backward_s for one in rounds),
        forward_by_layer_s={
            name: median(one.forward_by_layer_s[name] for one in rounds) for name in rounds[0].forward_by_layer_s
        },
        ready_s=list(accumulate(ready_s, max)),
    )


def plan_all_reduce(config: RunConfig, info: RankInfo, store: RankStore) -> Tuning:
    """Return the communication plan of a run, with every candidate measured.  All ranks call this."""
    noise = noise_like(infer_shape(config.data), config.data.image_size)
    with prepare(config, info, store, data=noise) as ready:
        gradients = ready.training.gradients
        tuning = gradients.plans.tuning
        assert tuning is not None
        return measure(gradients.reducer, tuning, all_questions(tuning))
