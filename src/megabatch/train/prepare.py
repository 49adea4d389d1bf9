"""From a recipe to a run that is ready to train, in the ranks that exist: connect, share the cores, load the images,
assemble, warm up."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import msgspec
import torch
from msgspec import Struct

from megabatch.config.schema import RunConfig
from megabatch.data.images import DataSet
from megabatch.data.normalise import PixelStatistics
from megabatch.data.sources import load_data_set
from megabatch.planning.topology import Topology
from megabatch.planning.tuning import Tuning
from megabatch.ranks.activity import Activity
from megabatch.ranks.backends import Backend
from megabatch.ranks.collectives import digest
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.machine import fair_threads, host_identity, usable_cores
from megabatch.ranks.store import RankStore
from megabatch.ranks.world import World, choose_device, connect
from megabatch.train.arithmetic import arithmetic, fix_workspace
from megabatch.train.assemble import NOTHING, Own, assemble, never
from megabatch.train.parts import Training
from megabatch.train.resume import has_checkpoint, stored_pixels, stored_tuning
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
