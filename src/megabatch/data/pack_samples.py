"""The samples of a pack, prepared by threads: read, checked, made smaller if need be, and laid out for the tar."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from msgspec import Struct

from megabatch.data.decode import Unreadable
from megabatch.data.pack_identity import PackSettings, Source
from megabatch.data.shard_writer import Sample
from megabatch.data.shrink import prepare
from megabatch.data.tars import Damaged


class Prepared(Struct, frozen=True):
    """What became of one image; without a sample, the reason."""

    sample: Sample | None
    reason: str
    source_bytes: int


class Prefetch:
    """What `make` makes of `numbers`, in their order, by threads that are up to `depth` ahead of what is taken."""

    def __init__(
        self, pool: ThreadPoolExecutor, make: Callable[[int], Prepared], numbers: Iterable[int], depth: int
    ) -> None:
        self.pool, self.make, self.numbers = pool, make, iter(numbers)
        self.waiting: deque[tuple[int, Future[Prepared]]] = deque()
        for _ in range(depth):
            self.submit_next()

    def submit_next(self) -> None:
        number = next(self.numbers, None)
        if number is not None:
            self.waiting.append((number, self.pool.submit(self.make, number)))

    def first(self) -> tuple[int, Prepared]:
        number, prepared = self.waiting[0]
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
