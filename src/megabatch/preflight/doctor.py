"""What limits a run: its input alone, its compute alone, and both together, in turn, in the ranks that would run it.

Nothing is written.  Steps are taken at a learning rate of 0: compute alone takes the same microbatch again and again.
"""

import dataclasses
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
from msgspec import Struct

from megabatch.config.schema import RunConfig
from megabatch.data.catalog import median_side
from megabatch.data.pack.shards import holds_shards
from megabatch.data.pipeline.batches import Stream
from megabatch.data.pipeline.encoded import EncodedImages
from megabatch.data.pipeline.reader import PREFETCHED, Batch, Batches
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.store import RankStore
from megabatch.ranks.world import World
from megabatch.runs.records import Record, StepRecord, TimeBreakdown
from megabatch.training.evaluate import NOT_EVALUATED
from megabatch.training.loop import train, train_on
from megabatch.training.parts import Training
from megabatch.training.prepare import prepare, share_of_cores

ROUNDS = 3
MOST_WAIT = 0.05  # of the time, that a run may wait for images without being limited by them
IN_EACH_OTHERS_WAY = 0.85  # of the speed of the slower one: below, input and compute share the same cores
MUCH_LARGER = 1.25  # than what is needed: worth packing
ENDLESS = 10**9
SHORT_S = 0.5


class Diagnosis(Struct, frozen=True, kw_only=True):
    input_per_s: float  # images, over all ranks
    compute_per_s: float
    both_per_s: float
    waited: TimeBreakdown  # shares of the time of both, on rank 0
    spent: TimeBreakdown  # shares of the time of input alone
    num_ranks: int
    decode_threads: int  # of a rank; 0 where there is nothing to decode
    source: str
    image_size: int
    shorter_side: float | None  # of encoded images, the median
    cores: int = 0  # of a rank: its share of the host's
    in_tars: bool = False  # the source is a pack, or tars already


def diagnose(config: RunConfig, info: RankInfo, store: RankStore, seconds: float) -> Diagnosis:
    """One rank's part; `seconds` is how long each of the three is run."""
    with prepare(config, info, store) as (config, training):
        images = training.data.train
        speeds, waited, spent = measure(training, seconds)
        return Diagnosis(
            **{f"{arm}_per_s": speed for arm, speed in speeds.items()},
            waited=waited,
            spent=spent,
            num_ranks=training.world.num_ranks,
            decode_threads=config.run.decode_threads or 1 if isinstance(images, EncodedImages) else 0,
            source=config.data.source,
            image_size=config.data.image_size,
            shorter_side=median_side(images.files, config.data.max_pixels)
            if isinstance(images, EncodedImages)
            else None,
            cores=share_of_cores(training.world),
            in_tars=isinstance(images, EncodedImages) and holds_shards(Path(config.data.source)),
        )


def measure(training: Training, seconds: float) -> tuple[dict[str, float], TimeBreakdown, TimeBreakdown]:
    """Images per second of each arm; the shares of what both waited for, and of what input alone was spent on."""
    plan = msgspec.structs.replace(training.plan, num_steps=ENDLESS)
    training.images.plan = plan
    training = dataclasses.replace(training, plan=plan, learning_rate=lambda step: 0.0, evaluate=lambda: NOT_EVALUATED)
    first = Batch(*training.images.microbatch(0, plan.microbatches_of(training.world.rank)[0]))
    with (
        training.images.stream(training.world.rank) as stream,
        closing(train_on(Stream(again_and_again(first)), training, 0)) as compute,
        closing(train(training)) as both,
    ):
        arms: dict[str, Callable[[], TimeBreakdown]] = {
            "input": lambda: take_batches(stream, plan.accumulation),
            "compute": lambda: take_step(compute),
            "both": lambda: take_step(both),
        }
        blocks = {arm: choose_steps(step, seconds / ROUNDS, training.world) for arm, step in arms.items()}
        taken_s = dict.fromkeys(arms, 0.0)
        waited = {arm: TimeBreakdown() for arm in arms}
        for _ in range(ROUNDS):
            for arm, step in arms.items():
                for _ in range(-(-PREFETCHED // plan.accumulation)):  # what was made while others had their turn
                    step()
                taken_s[arm] += time_steps(step, blocks[arm], waited[arm], training.world)
    speeds = {arm: ROUNDS * blocks[arm] * plan.global_batch / taken_s[arm] for arm in arms}
    return speeds, waited["both"].scaled(1 / taken_s["both"]), waited["input"].scaled(1 / waited["input"].total)


def again_and_again(batch: Batch) -> Batches:
    while True:
        yield batch


def take_batches(stream: Stream, count: int) -> TimeBreakdown:
    for _ in range(count):
        stream.next()
    return stream.take_account()[0]


def take_step(records: Iterator[Record]) -> TimeBreakdown:
    return next(record for record in records if isinstance(record, StepRecord)).data_wait


def choose_steps(step: Callable[[], TimeBreakdown], seconds: float, world: World) -> int:
    """As many as take so long, on all ranks the same.  The first are ready before they are asked for."""
    for _ in range(PREFETCHED + 1):
        step()
    count, taken_s = 1, 0.0
    while taken_s < min(SHORT_S, seconds):
        count *= 2
        (taken_s,) = world.all_reduce_max([time_steps(step, count, TimeBreakdown(), world)])
    return max(1, round(count * seconds / taken_s))


def time_steps(step: Callable[[], TimeBreakdown], count: int, waited: TimeBreakdown, world: World) -> float:
    """Until the last rank is done."""
    world.barrier()
    begun_s = time.perf_counter()
    for _ in range(count):
        waited.add(step())
    world.barrier()
    return time.perf_counter() - begun_s


def advise(found: Diagnosis) -> str:
    """One sentence: what limits the run, by which figures, and what to change."""
    alone = f"{found.input_per_s:,.0f} images/s alone"
    slower_per_s = min(found.input_per_s, found.compute_per_s)
    if found.waited.total > MOST_WAIT or found.input_per_s < found.compute_per_s:
        return (
            f"input limits this run: it makes {alone} where compute takes {found.compute_per_s:,.0f}, and "
            f"{found.waited.total:.0%} of the time is spent waiting for it; {remedy(found)}"
        )
    if found.decode_threads and found.both_per_s < IN_EACH_OTHERS_WAY * slower_per_s:
        return (
            f"compute limits this run, and input is in its way: {found.compute_per_s:,.0f} images/s alone, "
            f"{found.both_per_s:,.0f} while input ({alone}) uses the same cores; {remedy(found)}"
        )
    return (
        f"compute limits this run: it takes {found.compute_per_s:,.0f} images/s, and input makes {alone}, "
        f"{found.input_per_s / found.compute_per_s:.1f} times as many; nothing is to be gained from the input"
    )


def remedy(found: Diagnosis) -> str:
    """By the stage that takes longest; never what is done already."""
    stage = max(found.spent.__struct_fields__, key=lambda name: getattr(found.spent, name))
    most = f"{stage} takes {getattr(found.spent, stage):.0%} of it"
    wanted = round(found.image_size * 8 / 7)  # 256 for 224
    if stage in ("read", "decode") and found.shorter_side and found.shorter_side > MUCH_LARGER * wanted:
        return f"{most}: megabatch pack {shlex.quote(found.source)} OUT --shorter-side {wanted}, then data.source=OUT"
    if stage == "read" and found.shorter_side and not found.in_tars:
        pack = f"megabatch pack {shlex.quote(found.source)} OUT, then data.source=OUT"
        return f"{most}: {pack}, or bring it to a faster disk"
    if stage == "read":
        return f"{most}: bring {found.source} to a faster disk"
    if stage == "copy":
        return f"{most}: {'fewer ranks on a host, or ' * (found.num_ranks > 1)}a smaller data.image_size"
    if 0 < found.decode_threads < found.cores:
        return f"{most}: run.decode_threads={found.cores}, as many as a rank has cores, or a smaller data.image_size"
    if found.decode_threads:
        threads = f"{found.decode_threads} thread{'s' * (found.decode_threads > 1)}"
        return f"{most}: more cores, on which each rank has {threads} for it now, or a smaller data.image_size"
    return f"{most}: fewer augmentations, or images that are read faster"
