"""Batches of an image set, made ahead of their use by threads and handed out in order.

Threads, because decoders release the GIL and write straight into the batch: processes would have to send every pixel.
At most PREFETCHED batches are made or wait, in memory that is used again and again.

Where there is an accelerator that memory is pinned, and a batch is copied to the device, by a stream of its own, before
it is asked for.  Nobody waits for a copy: memory is used again once an event says that it has been copied.

Whoever waits for a batch notices an image that takes longer than data.image_timeout_s (see `threads`), and ends with
its name; or, where such images are skipped, leaves its thread and the memory of its batch alone, and has both replaced.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from megabatch.data.pipeline.augment import Augmentation
from megabatch.data.pipeline.decode import TooLate, Unreadable
from megabatch.data.pipeline.encoded import EncodedImages
from megabatch.data.pipeline.images import ImageSet, InMemory
from megabatch.data.pipeline.order import Samples
from megabatch.data.pipeline.threads import MOST_LEFT, Doing, Threads, Watch
from megabatch.errors import UserError
from megabatch.runs.records import TimeBreakdown

# What stands in for an image that cannot be read.

MOST_IN_A_ROW = 1000  # unreadable images, after which there is no point in looking for a good one
SKIPPED = -1  # the label of a test image that cannot be read


def load_first(
    images: EncodedImages,
    candidates: range,
    begin: Callable[[int], None],
    load: Callable[[int], None],
    skipped: list[str],
) -> int:
    """Loads the first of the candidates that can be read; its label, or SKIPPED.

    So a batch keeps its size and the others their places, whoever makes it.  Candidates are neighbours in the set:
    mostly of the same class.
    """
    for candidate in candidates:
        sample = candidate % len(images)
        try:
            begin(sample)
            load(sample)
            return int(images.files.labels[sample])
        except Unreadable as error:
            if images.settings.on_error == "raise":
                raise images.complaint(sample, error) from None
            if candidate == candidates.start:
                where = images.files.where(sample, read=not isinstance(error, TooLate))
                skipped.append(f"{where} cannot be read: {error}")
    if len(candidates) > 1:
        raise UserError(f"{skipped[-1]}, and so for {len(candidates)} images in a row; fix the set")
    return SKIPPED


PREFETCHED = 4  # batches
IMAGES_A_PART = 8  # what a thread takes at once
CPU = torch.device("cpu")


class Request(NamedTuple):
    samples: Samples
    epochs: Samples | None  # None: as evaluation sees them


@dataclass
class Batch:
    images: torch.Tensor  # uint8 [B, C, H, W]; of encoded images valid until the next batch is asked for
    labels: torch.Tensor  # int64 [B]
    spent: TimeBreakdown = field(default_factory=TimeBreakdown)  # by all threads together
    skipped: list[str] = field(default_factory=list)  # images that cannot be read, and why
    memory: torch.Tensor | None = None  # that holds the images, to be used again
    is_late: bool = False  # an image of it takes too long: it is made again, without that one


Ask = Callable[[], Request]  # worked out by a thread too: at the beginning of an epoch its order takes a while
Part = Callable[[], None]
Begun = tuple[Batch, list[Future[None]]]
Batches = Generator[Batch, None, None]


class Reader:
    """`augmentation` of (samples, epochs) is what is done to training images."""

    def __init__(
        self,
        images: ImageSet,
        device: torch.device = CPU,
        augmentation: Callable[[Samples, Samples], Augmentation] | None = None,
    ) -> None:
        self.images, self.device, self.augmentation = images, device, augmentation
        self.threads = images.threads if isinstance(images, EncodedImages) else 1
        self.lock = threading.Lock()
        self.watch = Watch(images.settings.image_timeout_s) if isinstance(images, EncodedImages) else None
        self.late: set[int] = set()  # images that take too long
        self.free: deque[torch.Tensor] = deque()
        self.copying: deque[tuple[torch.Event, torch.Tensor]] = deque()  # memory that a device may still read

    def make(self, request: Request) -> Batch:
        """Here and now, by the caller."""
        buffer = self.buffer(len(request.samples))
        batch, parts = self.begin(request, buffer)
        for part in parts:
            part()
        return without_skipped(batch)

    def prefetch(self, requests: Iterable[Ask]) -> Batches:
        """Made by threads while the caller does something else.  Close it to end them."""
        if self.device.type != "cpu":
            return self.prefetch_to_device(self.prefetch_by_threads(iter(requests)))
        # Where compute has the same cores, a thread that only gathers pixels costs more than it hides: 4 % of
        # `bench train`.
        return (
            self.make_each(requests) if isinstance(self.images, InMemory) else self.prefetch_by_threads(iter(requests))
        )

    def make_each(self, requests: Iterable[Ask]) -> Batches:
        for ask in requests:
            yield self.make(ask())

    def prefetch_by_threads(self, requests: Iterator[Ask]) -> Batches:
        begun: deque[tuple[Ask, Future[Begun]]] = deque()
        with Threads(self.threads, "megabatch-input", self.watch.limit_s if self.watch else None) as pool:
            while True:
                while len(begun) < PREFETCHED and (ask := next(requests, None)):
                    begun.append((ask, pool.submit(partial(self.begin_in, pool, ask))))
                if not begun:
                    return
                batch = self.finish(pool, *begun.popleft())
                yield without_skipped(batch)
                if batch.memory is not None:
                    self.free.append(batch.memory)

    def finish(self, pool: Threads, ask: Ask, begun: Future[Begun]) -> Batch:
        """The batch, made again where one of its images takes too long: a thread may still write to the first."""
        self.wait(pool, begun)
        batch, parts = begun.result()
        for part in parts:
            self.wait(pool, part, batch)
            if batch.is_late:
                return self.finish(pool, ask, pool.submit(partial(self.begin_in, pool, ask)))
            part.result()
        return batch

    def wait(self, pool: Threads, future: Future[Any], batch: Batch | None = None) -> None:
        """Until it is done, or an image of the batch takes too long."""
        while self.watch and not (batch and batch.is_late) and (late := self.watch.wait(future)):
            for doing in late:
                self.leave(pool, doing)

    def leave(self, pool: Threads, doing: Doing) -> None:
        """An image that takes too long, and the thread that is at it."""
        images = self.images
        assert isinstance(images, EncodedImages) and self.watch
        error = self.too_late()
        pool.replace(doing.thread)
        if images.settings.on_error == "raise":
            raise images.complaint(doing.image, error)
        if self.watch.num_late > MOST_LEFT:
            where = images.files.where(doing.image, read=False)
            raise UserError(f"{where} cannot be read: {error}, and so for {MOST_LEFT} others; see what they lie on")
        self.late.add(doing.image)
        doing.of.is_late = True

    def too_late(self) -> TooLate:
        assert self.watch
        return TooLate(f"it takes longer than data.image_timeout_s={self.watch.limit_s:g}")

    def prefetch_to_device(self, batches: Batches) -> Batches:
        """On the device one batch before it is needed."""
        stream = copy_stream(self.device)
        waiting: Batch | None = None
        try:
            for batch in batches:
                begun_s = time.perf_counter()
                with stream:
                    images, labels = (
                        (tensor if tensor.is_pinned() else tensor.pin_memory()).to(self.device, non_blocking=True)
                        for tensor in (batch.images, batch.labels)
                    )
                    copied = stream.record_event()
                if batch.memory is not None:
                    with self.lock:
                        self.copying.append((copied, batch.memory))
                    batch.memory = None
                moved = Batch(images, labels, batch.spent, batch.skipped)
                moved.spent.copy += time.perf_counter() - begun_s
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

    def begin_in(self, pool: Threads, ask: Ask) -> Begun:
        """Hands the parts of a batch to the threads."""
        request = ask()
        count = len(request.samples)
        buffer = self.take_free(count)
        if buffer is None:
            buffer = self.buffer(count)
        batch, parts = self.begin(request, None if buffer is None else buffer[:count])
        batch.memory = buffer
        return batch, [pool.submit(part) for part in parts]

    def take_free(self, count: int) -> torch.Tensor | None:
        """Memory for so many images that nobody reads any more."""
        with self.lock:
            while self.copying and self.copying[0][0].query():
                self.free.append(self.copying.popleft()[1])
            while self.free:
                buffer = self.free.popleft()
                if len(buffer) >= count:
                    return buffer
        return None

    def buffer(self, count: int) -> torch.Tensor | None:
        """None for images that bring their own memory."""
        if not isinstance(self.images, EncodedImages):
            return None
        return self.images.buffer(count, pinned=self.device.type != "cpu")

    def begin(self, request: Request, buffer: torch.Tensor | None) -> tuple[Batch, list[Part]]:
        """A batch that is complete when all its parts have been run, in any order and thread."""
        samples, epochs = request
        augmentation = self.augmentation(samples, epochs) if self.augmentation and epochs is not None else None
        labels = self.images.labels[torch.from_numpy(samples)]
        if buffer is None:
            batch = Batch(torch.empty(0), labels)
            return batch, [partial(self.read, batch, samples, augmentation)]
        batch = Batch(buffer, labels)
        decode = partial(self.decode, batch, buffer.split(1), samples, augmentation)
        places = range(len(samples))
        return batch, [
            partial(decode, places[start : start + IMAGES_A_PART]) for start in range(0, len(samples), IMAGES_A_PART)
        ]

    def read(self, batch: Batch, samples: Samples, augmentation: Augmentation | None) -> None:
        """All of a batch whose images need no decoding."""
        begun_s = time.perf_counter()
        pixels = self.images.read(samples)
        read_s = time.perf_counter()
        batch.images = augmentation.change(pixels) if augmentation else pixels
        batch.spent = TimeBreakdown(read=read_s - begun_s, augment=time.perf_counter() - read_s)

    def decode(
        self,
        batch: Batch,
        outs: Sequence[torch.Tensor],
        samples: Samples,
        augmentation: Augmentation | None,
        places: range,
    ) -> None:
        """Some images of a batch whose images are encoded."""
        images, watch = self.images, self.watch
        assert isinstance(images, EncodedImages) and watch
        thread, spent, skipped = threading.get_ident(), TimeBreakdown(), list[str]()

        def begin(sample: int) -> None:
            if sample in self.late:
                raise self.too_late()
            watch.doing[thread] = Doing(thread, sample, batch)

        crops, pads = (augmentation.crops, augmentation.padding > 0) if augmentation else (None, False)
        labels = batch.labels.numpy()  # torch would let go of the GIL for each
        for place in places:
            choose_box = partial(crops.box, place) if crops else images.central_box
            mirrored = augmentation is not None and not pads and bool(augmentation.mirrored[place])
            load = partial(images.load, choose_box=choose_box, out=outs[place], spent=spent, mirrored=mirrored)
            sample = int(samples[place])
            candidates = range(sample, sample + (min(len(images), MOST_IN_A_ROW) if augmentation else 1))
            labels[place] = load_first(images, candidates, begin, load, skipped)
            if augmentation and pads:
                begun_s = time.perf_counter()
                augmentation.pad(place, outs[place])
                spent.augment += time.perf_counter() - begun_s
        watch.doing.pop(thread, None)
        with self.lock:
            batch.spent.add(spent)
            batch.skipped.extend(skipped)


def without_skipped(batch: Batch) -> Batch:
    """Test images have no substitutes."""
    kept = batch.labels != SKIPPED
    batch.skipped.sort()  # threads are done in any order
    if not kept.all():
        batch.images, batch.labels = batch.images[kept], batch.labels[kept]
    return batch


@cache
def copy_stream(device: torch.device) -> torch.Stream:
    """One: the allocator keeps memory for every stream that it has seen."""
    return torch.Stream(device)
