"""Prefetches batches of an image set with threads and returns them in order.

Decoders release the GIL and write directly into the batch, so threads suffice on a CPU.  For an accelerator the threads
run in a separate process (see `decoder_process`), because the thread that launches kernels needs the GIL.  A fixed
number of batches is in progress or waiting, in memory that is reused.

For an accelerator this memory is pinned, and a separate stream copies a batch to the device before it is requested.
The host never waits for a copy: memory is reused after an event reports that it has been copied.

The caller that waits for a batch detects an image that takes longer than data.image_timeout_s (see `threads`) and
raises an error with its name.  If such images are skipped, it abandons the thread and the memory of the batch instead,
and replaces both.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from megabatch.data.pipeline.augment import Augmentation
from megabatch.data.pipeline.decode import TimedOut, Unreadable
from megabatch.data.pipeline.decoder_process import DecoderProcess
from megabatch.data.pipeline.device_decoder import (
    DECODERS,
    ROOM,
    CannotDecode,
    FileRead,
    Place,
    decode_batch,
    fill,
    plan_places,
)
from megabatch.data.pipeline.encoded import EncodedImages, at_side
from megabatch.data.pipeline.images import ImageSet, is_in_memory
from megabatch.data.pipeline.order import Samples
from megabatch.data.pipeline.orientation import Box
from megabatch.data.pipeline.threads import MAX_ABANDONED, Task, Threads, Watch
from megabatch.errors import UserError
from megabatch.runs.records import TimeBreakdown

MOST_IN_A_ROW = 1000  # unreadable images, after which the search for a substitute ends
SKIPPED = -1  # the label of a test image that cannot be read
PREFETCHED = 4  # batches, at least
PREFETCHED_IMAGES, PREFETCHED_BYTES = 1024, 256 << 20  # for an accelerator, if that is more batches
IMAGES_PER_PART = 8  # images that a thread loads at a time
CPU = torch.device("cpu")


class BatchRequest(NamedTuple):
    samples: Samples
    epochs: Samples | None  # None: without augmentation, for evaluation
    side: int | None = None  # None: that of the image set


FileReads = list[FileRead | None]  # None: a test image that cannot be read


@dataclass
class Batch:
    images: torch.Tensor  # uint8 [B, C, H, W]; encoded images are valid until the next batch is requested
    labels: torch.Tensor  # int64 [B]
    spent: TimeBreakdown = field(default_factory=TimeBreakdown)  # summed over threads
    skipped: list[str] = field(default_factory=list)  # images that cannot be read, with the reason
    memory: torch.Tensor | None = None  # of the images, to be reused
    is_late: bool = False  # an image timed out, so the batch is made again without it
    # For a decoder on the device: the files, then their places in `memory`; `images` only has the shape.
    reads: FileReads | None = None
    places: list[Place] | None = None


MakeRequest = Callable[[], BatchRequest]  # called by a thread, because computing the order of an epoch takes a while
Part = Callable[[], None]
Started = tuple[Batch, list[Future[None]]]
Batches = Generator[Batch, None, None]


def load_first(
    images: EncodedImages,
    candidates: range,
    begin: Callable[[int], None],
    load: Callable[[int], None],
    skipped: list[str],
) -> int:
    """Load the first of the candidates that can be read.  Return its label, or SKIPPED.

    A substitute keeps the size of the batch and the positions of the other images.  Candidates are adjacent in the set,
    so most are of the same class.
    """
    for candidate in candidates:
        sample = candidate % len(images)
        try:
            begin(sample)
            load(sample)
            return int(images.files.labels[sample])
        except Unreadable as error:
            if images.settings.on_error == "raise":
                raise images.unreadable_image(sample, error) from None
            if candidate == candidates.start:
                where = images.files.where(sample, read=not isinstance(error, TimedOut))
                skipped.append(f"{where} cannot be read: {error}")
    if len(candidates) > 1:
        raise UserError(f"{skipped[-1]}; {len(candidates)} images in a row cannot be read; check the files")
    return SKIPPED


class Reader:
    """Reader of an image set.  `augmentation(samples, epochs, side)` is applied to training images."""

    def __init__(
        self,
        images: ImageSet,
        device: torch.device = CPU,
        augmentation: Callable[[Samples, Samples, int | None], Augmentation] | None = None,
    ) -> None:
        self.images, self.device, self.augmentation = images, device, augmentation
        self.threads = images.threads if isinstance(images, EncodedImages) else 1
        self.lock = threading.Lock()
        self.watch = Watch(images.settings.image_timeout_s) if isinstance(images, EncodedImages) else None
        self.late: set[int] = set()  # images that timed out
        self.free: deque[torch.Tensor] = deque()
        self.copying: deque[tuple[torch.Event, torch.Tensor]] = deque()  # memory that a device may still read
        self.on_device = device.type != "cpu" and isinstance(images, EncodedImages) and images.has_device_decoder

    def make(self, request: BatchRequest) -> Batch:
        """Make a batch in the calling thread."""
        batch, parts = self.split(request, self.new_buffer(len(request.samples)))
        for part in parts:
            part()
        return without_skipped(batch)

    def num_ahead(self, batch_size: int) -> int:
        """Return the number of batches in progress or waiting, for batches of up to this size.

        A GPU takes small batches in milliseconds: the smaller they are, the more are ahead, up to a limit of bytes.
        """
        if self.device.type == "cpu" or not isinstance(self.images, EncodedImages):
            return PREFETCHED
        most = PREFETCHED_BYTES // (batch_size * self.images.image_bytes)
        return max(PREFETCHED, min(most, -(-PREFETCHED_IMAGES // batch_size)))

    def prefetch(self, requests: Iterable[MakeRequest], batch_size: int) -> Batches:
        """Yield batches that threads make while the caller does something else.  Close the generator to end them."""
        num_ahead = self.num_ahead(batch_size)
        if isinstance(self.images, EncodedImages) and self.images.decoder:
            stream = Reader(self.images, self.device, self.augmentation)  # the memory belongs to one stream
            batches = stream.prefetch_by_process(self.images.decoder, iter(requests), num_ahead)
            return batches if self.device.type == "cpu" else stream.prefetch_to_device(batches)
        if self.device.type != "cpu":
            return self.prefetch_to_device(self.prefetch_by_threads(iter(requests), num_ahead))
        # A thread that only gathers pixels competes with compute for the cores and costs more than it hides: 4 % of
        # `bench train`.
        if is_in_memory(self.images):
            return (self.make(request()) for request in requests)
        return self.prefetch_by_threads(iter(requests), num_ahead)

    def prefetch_by_threads(self, requests: Iterator[MakeRequest], num_ahead: int) -> Batches:
        with closing(self.in_order(requests, num_ahead)) as batches:
            for batch in batches:
                yield without_skipped(batch)

    def prefetch_by_process(self, decoder: DecoderProcess, requests: Iterator[MakeRequest], num_ahead: int) -> Batches:
        pins = self.device.type != "cpu"
        stream = decoder.stream(self.images, self.augmentation, num_ahead, pins, self.on_device)
        with closing(stream):
            try:
                for decoded, buffer in stream.batches(requests, self.take_all_free):
                    labels = torch.from_numpy(decoded.labels)
                    images = at_side(buffer, len(labels), decoded.side)
                    batch = Batch(images, labels, decoded.spent, decoded.skipped, buffer, places=decoded.places)
                    yield without_skipped(batch)
                    if batch.memory is not None:
                        self.free.append(batch.memory)
            finally:  # the stream releases the memory
                for copied, _ in self.copying:
                    if not copied.query():
                        copied.synchronize()
                self.copying.clear()
                self.free.clear()

    def in_order(self, requests: Iterator[MakeRequest], num_ahead: int) -> Batches:
        """Yield batches that threads make.

        Their memory is reused when the next one is requested, unless the caller took it.
        """
        started: deque[tuple[MakeRequest, Future[Started]]] = deque()
        patience_s = self.watch.limit_s if self.watch else None
        with Threads(self.threads, "megabatch-input", patience_s, self.device) as pool:
            while True:
                while len(started) < num_ahead and (request := next(requests, None)):
                    started.append((request, pool.submit(partial(self.start, pool, request))))
                if not started:
                    return
                batch = self.finish(pool, *started.popleft())
                yield batch
                if batch.memory is not None:
                    self.free.append(batch.memory)

    def finish(self, pool: Threads, request: MakeRequest, started: Future[Started]) -> Batch:
        """Wait for a batch.  If an image times out, make the batch again: a thread may still write to the first one."""
        self.wait(pool, started)
        batch, parts = started.result()
        for part in parts:
            self.wait(pool, part, batch)
            if batch.is_late:
                return self.finish(pool, request, pool.submit(partial(self.start, pool, request)))
            part.result()
        if batch.reads is not None:
            self.pack(batch, batch.reads)
        return batch

    def pack(self, batch: Batch, reads: FileReads) -> None:
        """Copy the files of a batch into one buffer, for a decoder on the device."""
        assert isinstance(self.images, EncodedImages)
        found = [read for read in reads if read]
        batch.labels = batch.labels[batch.labels != SKIPPED]
        batch.places = plan_places(found)
        num_bytes = max((place.end for place in batch.places), default=0)
        count = max(len(reads), -(-num_bytes // self.images.image_bytes))
        batch.memory = self.take_free(count)
        if batch.memory is None:
            batch.memory = self.new_buffer(math.ceil(ROOM * count))
        assert batch.memory is not None
        fill(batch.memory, found, batch.places)
        batch.images, batch.reads = at_side(batch.memory, len(found), batch.images.shape[3]), None

    def wait(self, pool: Threads, future: Future[Any], batch: Batch | None = None) -> None:
        """Wait until the future is done or an image of the batch times out."""
        while self.watch and not (batch and batch.is_late) and (late := self.watch.wait(future)):
            for task in late:
                self.abandon(pool, task)

    def abandon(self, pool: Threads, task: Task) -> None:
        """Give up on an image that timed out, and on its thread."""
        images = self.images
        assert isinstance(images, EncodedImages) and self.watch
        error = self.timed_out()
        pool.replace(task.thread)
        if images.settings.on_error == "raise":
            raise images.unreadable_image(task.image, error)
        if self.watch.num_late > MAX_ABANDONED:
            where = images.files.where(task.image, read=False)
            raise UserError(
                f"{where} cannot be read: {error}, like {MAX_ABANDONED} other images; check the disk or file server"
            )
        self.late.add(task.image)
        task.batch.is_late = True

    def timed_out(self) -> TimedOut:
        assert self.watch
        return TimedOut(f"it takes longer than data.image_timeout_s={self.watch.limit_s:g}")

    def prefetch_to_device(self, batches: Batches) -> Batches:
        """Copy each batch to the device while the previous one is in use."""
        stream = copy_stream(self.device)
        waiting: Batch | None = None
        try:
            for batch in batches:
                begin_s = time.perf_counter()
                with stream:
                    labels = self.copy(batch.labels)
                    images = self.copy(batch.images) if batch.places is None else self.decode_on_device(batch)
                    copied = stream.record_event()
                if batch.memory is not None:
                    with self.lock:
                        self.copying.append((copied, batch.memory))
                    batch.memory = None
                moved = Batch(images, labels, batch.spent, batch.skipped)
                moved.spent.copy += time.perf_counter() - begin_s
                if waiting:
                    yield waiting
                current = torch.accelerator.current_stream(self.device)
                current.wait_event(copied)
                for tensor in (images, labels):
                    tensor.record_stream(current)
                waiting = moved
            if waiting:
                yield waiting
        finally:
            batches.close()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(self.device, non_blocking=True)

    def decode_on_device(self, batch: Batch) -> torch.Tensor:
        images = self.images
        assert isinstance(images, EncodedImages) and batch.places is not None and batch.memory is not None
        name = images.settings.decoder
        try:
            return decode_batch(DECODERS[name], batch.memory, batch.places, batch.images.shape[3], self.device)
        except CannotDecode as error:
            of_jpegs = [place for place in batch.places if place.box]
            where = images.files.where(of_jpegs[error.index].sample)
            raise UserError(
                f"{where} cannot be decoded by data.decoder={name}: {error}; check it with `megabatch check`, or set "
                "data.decoder=cpu"
            ) from None

    def start(self, pool: Threads, make_request: MakeRequest) -> Started:
        """Submit the parts of a batch to the threads."""
        request = make_request()
        count = len(request.samples)
        buffer = None if self.on_device else self.take_free(count)
        if buffer is None and not self.on_device:
            buffer = self.new_buffer(count)
        batch, parts = self.split(request, buffer)
        batch.memory = buffer
        return batch, [pool.submit(part) for part in parts]

    def collect_copied(self) -> None:
        """Free the memory that the device has read."""
        while self.copying and self.copying[0][0].query():
            self.free.append(self.copying.popleft()[1])

    def take_all_free(self) -> list[torch.Tensor]:
        self.collect_copied()
        free, self.free = [*self.free], deque()
        return free

    def take_free(self, count: int) -> torch.Tensor | None:
        """Return a free buffer for at least `count` images, or None."""
        with self.lock:
            self.collect_copied()
            for _ in range(len(self.free)):
                buffer = self.free.popleft()
                if len(buffer) >= count:
                    return buffer
                self.free.append(buffer)
        return None

    def new_buffer(self, count: int) -> torch.Tensor | None:
        """Allocate a buffer, or return None for images that are not decoded into one."""
        if not isinstance(self.images, EncodedImages):
            return None
        return self.images.buffer(count, pinned=self.device.type != "cpu")

    def split(self, request: BatchRequest, buffer: torch.Tensor | None) -> tuple[Batch, list[Part]]:
        """Return a batch and its parts, which must all be run, in any order and in any thread."""
        samples, epochs, side = request
        augmentation = self.augmentation(samples, epochs, side) if self.augmentation and epochs is not None else None
        labels = self.images.labels[torch.from_numpy(samples)]
        if not isinstance(self.images, EncodedImages):
            batch = Batch(torch.empty(0), labels)
            return batch, [partial(self.read, batch, samples, augmentation)]
        if buffer is None:  # for a decoder on the device
            side = side or self.images.side
            batch = Batch(torch.empty(0, 3, side, side, dtype=torch.uint8), labels, reads=[None] * len(samples))
        else:
            batch = Batch(at_side(buffer, len(samples), side or buffer.shape[3]), labels)
        decode = partial(self.decode, batch, batch.images.split(1), samples, augmentation)
        places = range(len(samples))
        return batch, [
            partial(decode, places[start : start + IMAGES_PER_PART])
            for start in range(0, len(samples), IMAGES_PER_PART)
        ]

    def read(self, batch: Batch, samples: Samples, augmentation: Augmentation | None) -> None:
        """Read a whole batch of images that are not encoded."""
        begin_s = time.perf_counter()
        pixels = self.images.read(samples)
        read_s = time.perf_counter()
        batch.images = augmentation.change(pixels) if augmentation else pixels
        batch.spent = TimeBreakdown(read=read_s - begin_s, augment=time.perf_counter() - read_s)

    def decode(
        self,
        batch: Batch,
        outs: Sequence[torch.Tensor],
        samples: Samples,
        augmentation: Augmentation | None,
        places: range,
    ) -> None:
        """Load and augment the images at `places` of a batch of encoded images."""
        images, watch = self.images, self.watch
        assert isinstance(images, EncodedImages) and watch
        thread, spent, skipped = threading.get_ident(), TimeBreakdown(), list[str]()

        def begin(sample: int) -> None:
            if sample in self.late:
                raise self.timed_out()
            watch.running[thread] = Task(thread, sample, batch)

        crops, pads = (augmentation.crops, augmentation.padding > 0) if augmentation else (None, False)
        finishes = augmentation is not None and (augmentation.recolouring or augmentation.erasing) is not None
        labels = batch.labels.numpy()  # torch would release the GIL for each label
        for place in places:
            choose_box = partial(crops.box, place) if crops else images.central_box
            mirrored = augmentation is not None and not pads and bool(augmentation.mirrored[place])
            load: Callable[[int], None]
            if batch.reads is None:
                load = partial(images.load, choose_box=choose_box, out=outs[place], spent=spent, mirrored=mirrored)
            else:
                load = partial(self.read_for_device, batch, place, choose_box, spent, mirrored)
            sample = int(samples[place])
            candidates = range(sample, sample + (min(len(images), MOST_IN_A_ROW) if augmentation else 1))
            labels[place] = load_first(images, candidates, begin, load, skipped)
            if augmentation and (pads or finishes):
                begin_s = time.perf_counter()
                if pads:
                    augmentation.pad(place, outs[place])
                augmentation.finish(place, outs[place][0])
                spent.augment += time.perf_counter() - begin_s
        watch.running.pop(thread, None)
        with self.lock:
            batch.spent.add(spent)
            batch.skipped.extend(skipped)

    def read_for_device(
        self,
        batch: Batch,
        place: int,
        choose_box: Callable[[int, int], Box],
        spent: TimeBreakdown,
        mirrored: bool,
        sample: int,
    ) -> None:
        assert isinstance(self.images, EncodedImages) and batch.reads is not None
        side = batch.images.shape[3]
        batch.reads[place] = self.images.read_for_device(sample, choose_box, side, spent, mirrored)


def without_skipped(batch: Batch) -> Batch:
    """Remove the test images that could not be read, which have no substitutes."""
    is_read = batch.labels != SKIPPED
    batch.skipped.sort()  # threads finish in any order
    if not is_read.all():
        batch.images, batch.labels = batch.images[is_read], batch.labels[is_read]
    return batch


@cache
def copy_stream(device: torch.device) -> torch.Stream:
    """Return one stream per device, because the allocator reserves memory for each stream."""
    return torch.Stream(device)
