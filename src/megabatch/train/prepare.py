"""From a recipe to a run that is ready to train, in the ranks that exist: connect, share the cores, load the images,
assemble, warm up."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import msgspec
import torch
from torch import nn

from megabatch.config.schema import RunConfig
from megabatch.data.images import DataSet
from megabatch.data.sources import load_data_set
from megabatch.planning.tuning import Tuning
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.machine import fair_threads, host_identity, usable_cores
from megabatch.ranks.store import RankStore
from megabatch.ranks.world import World, choose_device, connect
from megabatch.train.assemble import assemble, never
from megabatch.train.loop import Training
from megabatch.train.resume import has_checkpoint, stored_tuning
from megabatch.train.warm_up import warm_up


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
    network: nn.Module | None = None,  # instead of the recipe's
    stop_requested: Callable[[], bool] = never,
    resume: str | None = None,  # gradients are all-reduced as in the run that this resumes, if in any
    retune: bool = False,  # but not then
) -> Iterator[Prepared]:
    device = choose_device(config.run.device)
    with (
        connect(info, device, store.store if store else None, config.comm.timeout_s) as world,
        store.failures_announced() if store else nullcontext(),
    ):
        config = share_cores(config, world)
        data = load_data_set(config.data, config.run.decode_threads or 1) if data is None else data
        stored = find_tuning(config, resume, world) if resume and not retune else None
        starting = without_weights(config) if resume and is_resumed(config, resume, world) else config
        yield Prepared(config, ready_to_train(starting, data, world, network, stop_requested, stored))


def ready_to_train(
    config: RunConfig,
    data: DataSet,
    world: World,
    network: nn.Module | None = None,
    stop_requested: Callable[[], bool] = never,
    stored: Tuning | None = None,
) -> Training:
    return warm_up(assemble(config, data, world, network, stop_requested), config.model, config.comm, stored)


def share_cores(config: RunConfig, world: World) -> RunConfig:
    """Gives this rank its share of the cores, and says so in the recipe: more threads would fight over them."""
    cores = world.all_gather((host_identity(), usable_cores()))
    threads = config.run.threads or fair_threads(world.rank, cores)
    torch.set_num_threads(threads)
    return config.with_run(threads=threads, decode_threads=config.run.decode_threads or threads)


def find_tuning(config: RunConfig, resume: str, world: World) -> Tuning | None:
    """How the run that is resumed has all-reduced its gradients, on all ranks; None if it begins."""
    tuning = stored_tuning(config, resume) if world.rank == 0 else None
    return msgspec.json.decode(world.broadcast_text(msgspec.json.encode(tuning).decode()), type=Tuning | None)


def is_resumed(config: RunConfig, resume: str, world: World) -> bool:
    """Whether weights come from a checkpoint and not from the recipe's file; the same on all ranks."""
    if not config.model.weights:
        return False  # nobody asks
    resumed = world.rank == 0 and has_checkpoint(config, resume)
    return world.broadcast_text("yes" if resumed else "no") == "yes"


def without_weights(config: RunConfig) -> RunConfig:
    """The weights of a run that resumes come from its checkpoint: the file need not be there any more."""
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, weights=None))
