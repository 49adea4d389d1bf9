"""The samples of a pack, prepared by threads: read, checked, made smaller if need be, and laid out for the tar."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from msgspec import Struct

from megabatch.data.decode import Unreadable
from megabatch.data.pack_identity import PackSettings, Source
from megabatch.data.shard_writer import Sample
from megabatch.data.shrink import prepare
from megabatch.data.tars import Damaged
from megabatch.data.threads import MOST_LEFT, Threads, Watch
from megabatch.errors import UserError

WHERE = "see what is wrong with the disk or the file server that they lie on"


class Prepared(Struct, frozen=True):
    """What became of one image; without a sample, the reason."""

    sample: Sample | None
    reason: str
    source_bytes: int
    is_late: bool = False  # whoever reads it has not come back


class Prefetch:
    """What `make` makes of `numbers`, in their order, by threads that are up to `depth` ahead of what is taken."""

    def __init__(
        self, pool: Threads, make: Callable[[int], Prepared], numbers: Iterable[int], depth: int, timeout_s: float
    ) -> None:
        self.pool, self.make, self.numbers = pool, make, iter(numbers)
        self.waiting: deque[tuple[int, Future[Prepared]]] = deque()
        self.watch = Watch(timeout_s)
        self.late: set[int] = set()
        for _ in range(depth):
            self.submit_next()

    def submit_next(self) -> None:
        number = next(self.numbers, None)
        if number is not None:
            self.waiting.append((number, self.pool.submit(partial(self.watched, number))))

    def watched(self, number: int) -> Prepared:
        self.watch.begin(number)
        try:
            return self.make(number)
        finally:
            self.watch.end()

    def first(self) -> tuple[int, Prepared]:
        number, prepared = self.waiting[0]
        while number not in self.late and (late := self.watch.wait(prepared)):
            self.late |= {doing.image for doing in late}
            for doing in late:
                self.pool.replace(doing.thread)
        if self.watch.num_late > MOST_LEFT:
            raise UserError(f"{self.watch.num_late} images take longer than {self.watch.limit_s:g} s each; {WHERE}")
        if number in self.late:
            return number, Prepared(None, f"it takes longer than {self.watch.limit_s:g} s to read", 0, is_late=True)
        return number, prepared.result()

    def take(self) -> None:
        self.waiting.popleft()
        self.submit_next()


def make_sample(files: Source, directories: list[str], settings: PackSettings, number: int) -> Prepared:
    """Read, checked, made smaller if need be, and laid out for the tar."""
    source_bytes, label = 0, int(files.labels[number])
    try:
        content = files.content(number)
        source_bytes = len(content)
        stored = prepare(content, settings.shorter_side, settings.quality)
        stem, _, extension = files.name(number).rpartition("/")[2].rpartition(".")
    except (Unreadable, Damaged, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return Prepared(None, reason, source_bytes)
    key = f"{directories[label]}/{number:08d}-{stem.replace('.', '_')}"
    return Prepared(Sample.of(key, stored.suffix or member_suffix(extension), stored, label), "", source_bytes)


def member_suffix(extension: str) -> str:
    """WebDataset finds images by the suffix of their members, and a JPEG as `jpg`."""
    suffix = f".{extension.lower()}"
    return ".jpg" if suffix == ".jpeg" else suffix


def directory_of(class_name: str) -> str:
    """A class's folder in the tar.  A name that is none for a folder is made one: someone may unpack the tar."""
    name = class_name.replace("/", "_")
    return name if name.strip(".") else "_" * max(1, len(name))
