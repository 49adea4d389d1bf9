"""megabatch bench launches: the host time per step while images are decoded in the background.

On a GPU the host only launches kernels, so a step is as slow as the thread that launches them.  This bench runs the
real trainer on a fake CUDA (rehearsal/fake_cuda.py) with a network so small that launches are most of the work.  It
decodes photos at the same time, as fast as they can be decoded:
    idle       nothing is decoded
    threads    decoding threads in the rank's own process: they hold the GIL for a part of each image
    process    the same threads in a separate process (run.decode_in=process)
step_ms is the median over all steps; the arms take turns.  More cores than decoding threads are needed: otherwise the
arms also compete for the cores.
"""

import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

from megabatch.data.catalog import read_encoded
from megabatch.data.pipeline.augment import Augmentation
from megabatch.data.pipeline.batches import training_request
from megabatch.data.pipeline.decoder_process import DecoderProcess
from megabatch.data.pipeline.encoded import EncodedImages
from megabatch.data.pipeline.reader import Reader
from megabatch.data.settings import DataSettings
from megabatch.errors import UserError
from megabatch.training.loop import train
from megabatch_lab.bench.report import in_turns, report
from megabatch_lab.bench.startup import RANKS_PER_NODE, STEADY_STEP, config_for, started
from megabatch_lab.rehearsal import fake_cuda

ARMS = ("idle", "threads", "process")
PHOTOS, PHOTO_SIZE, IMAGE_SIZE, BATCH = 64, (500, 375), 224, 16
STEPS = 10  # of a turn
MOST_SECONDS = 30.0  # until decoders return a batch


def run(rounds: int, threads: int, json_file: Path | None) -> None:
    reason = fake_cuda.why_not()
    if reason:
        raise UserError(f"bench launches needs the fake CUDA: {reason}")
    fake_cuda.install()
    step_s: dict[str, list[float]] = {arm: [] for arm in ARMS}
    decoded_per_s: dict[str, list[float]] = {arm: [] for arm in ARMS}
    steps = f"train.steps={STEADY_STEP + (rounds + 1) * len(ARMS) * STEPS}"
    config = config_for(RANKS_PER_NODE, "comm.algorithm=flat", "comm.bucket_mb=25", steps)
    with ExitStack() as stack:
        settings = photos(Path(stack.enter_context(TemporaryDirectory())))
        process = stack.enter_context(DecoderProcess())
        training = stack.enter_context(started(config, RANKS_PER_NODE))
        records = stack.enter_context(closing(train(training)))
        for _ in range(STEADY_STEP):
            next(records)
        for arm, counts in in_turns(ARMS, rounds, warm_up=1):
            images = EncodedImages(read_encoded(Path(settings.source)).train, settings, threads)
            images.decoder = process if arm == "process" else None
            with decoding(images if arm != "idle" else None) as decoded:
                began_s, before = time.perf_counter(), len(decoded)
                taken_s = [time_of(records) for _ in range(STEPS)]
                if arm != "idle":
                    wait_for_batch(decoded, before)  # a busy machine may decode none during the steps
                if counts:
                    step_s[arm] += taken_s
                    decoded_per_s[arm].append((len(decoded) - before) * BATCH / (time.perf_counter() - began_s))
    medians = {arm: statistics.median(of_arm) for arm, of_arm in step_s.items()}
    rows = [
        {
            "decoders": arm,
            "decoding_threads": 0 if arm == "idle" else threads,
            "images_per_s": statistics.median(decoded_per_s[arm]),
            "step_ms": 1e3 * medians[arm],
            "to_idle": medians[arm] / medians["idle"],
        }
        for arm in ARMS
    ]
    report(rows, json_file)


def time_of(records: Iterator[Any]) -> float:
    began_s = time.perf_counter()
    next(records)
    return time.perf_counter() - began_s


def wait_for_batch(decoded: Sequence[int], before: int = 0) -> None:
    """Wait until more than `before` batches are decoded, for a limited time."""
    ends_s = time.monotonic() + MOST_SECONDS
    while len(decoded) <= before and time.monotonic() < ends_s:
        time.sleep(0.01)


@contextmanager
def decoding(images: EncodedImages | None) -> Iterator[list[int]]:
    """Decode images as fast as possible in this context.  Yield a list that grows by an element per batch."""
    decoded: list[int] = []
    if images is None:
        yield decoded
        return
    ends = threading.Event()
    requests = (
        partial(training_request, 1, len(images), range(BATCH * number, BATCH * (number + 1)), IMAGE_SIZE, None)
        for number in count()
    )

    def take() -> None:
        with closing(
            Reader(images, augmentation=partial(Augmentation, images.settings, 1)).prefetch(requests, BATCH)
        ) as batches:
            for batch in batches:
                decoded.append(len(batch.labels))
                if ends.is_set():
                    return

    with ThreadPoolExecutor(1) as beside:
        taking = beside.submit(take)
        try:
            wait_for_batch(decoded)
            yield decoded
        finally:
            ends.set()
        taking.result()


def photos(folder: Path) -> DataSettings:
    """Write photos with smooth shapes and some noise, and return settings to decode random crops of them."""
    generator = np.random.default_rng(0)
    width, height = PHOTO_SIZE
    for number in range(PHOTOS):
        path = folder / f"class{number % 2}" / f"{number:03d}.jpg"
        path.parent.mkdir(exist_ok=True)
        coarse = Image.fromarray(generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(PHOTO_SIZE)
        noise = generator.integers(-8, 9, (height, width, 3))
        Image.fromarray((np.asarray(coarse) + noise).clip(0, 255).astype(np.uint8)).save(path, quality=90)
    return DataSettings(source=str(folder), image_size=IMAGE_SIZE, crop_area=0.08, flip=True)
