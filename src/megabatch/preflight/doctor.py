"""Find the bottleneck of a run: time input only, compute only, and both together, alternately, on the run's ranks.

Nothing is written.  The learning rate is 0, and the compute arm repeats one microbatch.
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
from megabatch.data.pipeline.reader import Batch, Batches
from megabatch.planning.sizes import Stage
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.store import RankStore
from megabatch.ranks.world import World
from megabatch.runs.records import Record, StepRecord, TimeBreakdown
from megabatch.training.evaluate import NOT_EVALUATED
from megabatch.training.loop import train, train_on
from megabatch.training.parts import Training
from megabatch.training.prepare import prepare, share_of_cores

ROUNDS = 3
MOST_WAIT = 0.05  # share of the time; with a longer wait for images, input is the bottleneck
CONTENTION = 0.85  # relative to the slower arm; a lower speed of both means that they compete for cores
MUCH_LARGER = 1.25  # ratio of the image size to the needed size that is worth packing
ENDLESS = 10**9
SHORT_S = 0.5


class Diagnosis(Struct, frozen=True, kw_only=True):
    input_per_s: float  # images, over all ranks
    compute_per_s: float
    both_per_s: float
    waited: TimeBreakdown  # shares of the time of the arm `both`, on rank 0
    spent: TimeBreakdown  # shares of the time of the arm `input`
    num_ranks: int
    decode_threads: int  # per rank; 0 if images are not encoded
    source: str
    image_size: int
    shorter_side: float | None  # median of encoded images
    has_sizes: bool = False  # `data.sizes` is set, and `image_size` is the largest
    cores: int = 0  # per rank
    in_tars: bool = False  # the source is a pack or tars


def diagnose(config: RunConfig, info: RankInfo, store: RankStore, seconds: float) -> Diagnosis:
    """Measure each arm for `seconds`.  All ranks call this."""
    with prepare(config, info, store) as (config, training, _):
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
            has_sizes=bool(config.data.sizes),
            shorter_side=median_side(images.files, config.data.max_pixels)
            if isinstance(images, EncodedImages)
            else None,
            cores=share_of_cores(training.world)[0],
            in_tars=isinstance(images, EncodedImages) and holds_shards(Path(config.data.source)),
        )


def measure(training: Training, seconds: float) -> tuple[dict[str, float], TimeBreakdown, TimeBreakdown]:
    """Return images per second by arm, the waits of the arm `both`, and the time breakdown of the arm `input`."""
    plan = msgspec.structs.replace(training.plan, num_steps=ENDLESS)
    training.images.plan = plan
    # The largest images of `data.sizes`: most of the work, and their stage decides whether compute or input limits.
    largest = max(stage.side for stage in training.images.stages)
    training.images.stages = [Stage(largest, 0, ENDLESS)]
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
        blocks = {arm: choose_steps(step, seconds / ROUNDS, training) for arm, step in arms.items()}
        taken_s = dict.fromkeys(arms, 0.0)
        waited = {arm: TimeBreakdown() for arm in arms}
        for _ in range(ROUNDS):
            for arm, step in arms.items():
                # Drop the batches that were prefetched during the other arms.
                for _ in range(-(-training.images.num_ahead // plan.accumulation)):
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
    return stream.take_waits()[0]


def take_step(records: Iterator[Record]) -> TimeBreakdown:
    return next(record for record in records if isinstance(record, StepRecord)).data_wait


def choose_steps(step: Callable[[], TimeBreakdown], seconds: float, training: Training) -> int:
    """Return the number of steps that take `seconds`, equal on all ranks.  The first batches are prefetched."""
    for _ in range(training.images.num_ahead + 1):
        step()
    count, taken_s, world = 1, 0.0, training.world
    while taken_s < min(SHORT_S, seconds):
        count *= 2
        (taken_s,) = world.all_reduce_max([time_steps(step, count, TimeBreakdown(), world)])
    return max(1, round(count * seconds / taken_s))


def time_steps(step: Callable[[], TimeBreakdown], count: int, waited: TimeBreakdown, world: World) -> float:
    """Return the time of `count` steps on the slowest rank."""
    world.barrier()
    start_s = time.perf_counter()
    for _ in range(count):
        waited.add(step())
    world.barrier()
    return time.perf_counter() - start_s


def advise(found: Diagnosis) -> str:
    """Return one sentence with the bottleneck, the measurements and a remedy."""
    slower_per_s = min(found.input_per_s, found.compute_per_s)
    if found.waited.total > MOST_WAIT or found.input_per_s < found.compute_per_s:
        return (
            f"input limits this run: it delivers {found.input_per_s:,.0f} images/s by itself and compute processes "
            f"{found.compute_per_s:,.0f}; {found.waited.total:.0%} of the time is spent waiting for images; "
            f"{remedy(found)}"
        )
    if found.decode_threads and found.both_per_s < CONTENTION * slower_per_s:
        return (
            f"compute limits this run and competes with input for cores: {found.compute_per_s:,.0f} images/s by "
            f"itself, {found.both_per_s:,.0f} together with input ({found.input_per_s:,.0f} by itself); {remedy(found)}"
        )
    return (
        f"compute limits this run: it processes {found.compute_per_s:,.0f} images/s by itself and input delivers "
        f"{found.input_per_s:,.0f}, {found.input_per_s / found.compute_per_s:.1f} times as many; input needs no change"
    )


def remedy(found: Diagnosis) -> str:
    """Return a remedy for the slowest stage that is not applied already."""
    stage = max(found.spent.__struct_fields__, key=lambda name: getattr(found.spent, name))
    most = f"{stage} takes {getattr(found.spent, stage):.0%} of input time"
    wanted = round(found.image_size * 8 / 7)  # 256 for 224
    if stage in ("read", "decode") and found.shorter_side and found.shorter_side > MUCH_LARGER * wanted:
        return f"{most}: megabatch pack {shlex.quote(found.source)} OUT --shorter-side {wanted}, then data.source=OUT"
    if stage == "read" and found.shorter_side and not found.in_tars:
        pack = f"megabatch pack {shlex.quote(found.source)} OUT, then data.source=OUT"
        return f"{most}: {pack}, or use a faster disk"
    if stage == "read":
        return f"{most}: move {found.source} to a faster disk"
    if stage == "copy":
        return f"{most}: use {'fewer ranks per node or ' * (found.num_ranks > 1)}a smaller data.image_size"
    if 0 < found.decode_threads < found.cores:
        return f"{most}: set run.decode_threads={found.cores}, the cores of a rank, or use a smaller data.image_size"
    if found.decode_threads:
        threads = f"{found.decode_threads} thread{'s' * (found.decode_threads > 1)}"
        return f"{most}: use more cores (each rank has {threads} now) or a smaller data.image_size"
    return f"{most}: use fewer augmentations or a faster source"
