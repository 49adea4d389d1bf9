"""Images that never finish loading are named or skipped, and their threads are abandoned."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from megabatch.data.catalog import read_encoded
from megabatch.data.pack.identity import PackSettings
from megabatch.data.pack.write import pack
from megabatch.data.pipeline.encoded import EncodedImages
from megabatch.data.pipeline.reader import BatchRequest, Reader
from megabatch.data.pipeline.threads import TICKS, Threads, Watch
from megabatch.data.settings import DataSettings
from megabatch.data.sources.files import Content
from megabatch.data.sources.folders import FolderFiles
from megabatch.errors import UserError
from megabatch.io.reading import MOST_BYTES
from tests.support.photos import make_folder

HUNG = 7  # the image that never loads


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Return an event that is set at the end of the test, so that its threads end."""
    event = threading.Event()
    yield event
    event.set()


def hang(monkeypatch: pytest.MonkeyPatch, released: threading.Event) -> None:
    content = FolderFiles.content

    def content_or_hang(self: FolderFiles, number: int, most_bytes: int = MOST_BYTES) -> Content:
        if number == HUNG:
            released.wait()
        return content(self, number, most_bytes)

    monkeypatch.setattr(FolderFiles, "content", content_or_hang)


def images_of(folder: Path, on_error: str, threads: int) -> EncodedImages:
    settings = DataSettings(source=str(folder), image_size=16, on_error=on_error, image_timeout_s=1)  # type: ignore[arg-type]
    return EncodedImages(read_encoded(folder).train, settings, threads)


def read_all(images: EncodedImages, batch_size: int = 5) -> tuple[torch.Tensor, list[str]]:
    """Return all images in order, and the messages about skipped images."""
    chunks = np.split(np.arange(len(images)), range(batch_size, len(images), batch_size))
    with closing(
        Reader(images).prefetch((partial(BatchRequest, chunk, None) for chunk in chunks), batch_size)
    ) as batches:
        found = [(batch.images.clone(), batch.skipped) for batch in batches]
    return torch.cat([pixels for pixels, _ in found]), [line for _, skipped in found for line in skipped]


@pytest.mark.usefixtures("index_cache")
@pytest.mark.parametrize("threads", [1, 3])
def test_an_image_that_hangs_ends_the_run_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, released: threading.Event, threads: int
) -> None:
    images = images_of(make_folder(tmp_path / "set"), "raise", threads)
    hang(monkeypatch, released)
    with pytest.raises(UserError, match=r"bag/001\.jpg cannot be read: .*longer than data\.image_timeout_s=1;"):
        read_all(images)


@pytest.mark.usefixtures("index_cache")
@pytest.mark.parametrize("threads", [1, 2])
def test_an_image_that_hangs_is_skipped_and_all_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, released: threading.Event, threads: int
) -> None:
    images = images_of(make_folder(tmp_path / "set"), "skip", threads)
    expected = images.read(np.delete(np.arange(len(images)), HUNG))
    hang(monkeypatch, released)
    pixels, skipped = read_all(images)
    assert torch.equal(pixels, expected)
    assert len(skipped) == 1 and "bag/001.jpg cannot be read: it takes longer than" in skipped[0]


@pytest.mark.usefixtures("index_cache")
def test_a_pack_skips_or_names_an_image_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, released: threading.Event
) -> None:
    folder = make_folder(tmp_path / "set")
    monkeypatch.setattr("megabatch.data.pack.write.IMAGE_TIMEOUT_S", 0.3)
    hang(monkeypatch, released)
    with pytest.raises(UserError, match=r"bag/001\.jpg: .*longer than 0\.3 s.*--on-error skip"):
        pack(folder, tmp_path / "out", PackSettings())
    packed = pack(folder, tmp_path / "out", PackSettings(on_error="skip"))
    assert packed.num_images == 17 and packed.progress and len(packed.progress.skipped) == 1


def test_time_while_the_process_is_stopped_does_not_count() -> None:
    """The watch counts polls, and a stopped process does not poll."""
    watch = Watch(limit_s=1e9)
    watch.begin(3)
    for _ in range(TICKS):
        assert not watch.poll()
    watch.begin(3)  # start over
    assert not watch.poll()
    for _ in range(TICKS - 1):
        assert not watch.poll()
    assert [doing.image for doing in watch.poll()] == [3]
    assert not watch.poll()  # reported once


def test_finished_work_is_never_late() -> None:
    watch = Watch(limit_s=1e-6)
    done: Future[int] = Future()
    done.set_result(1)
    watch.begin(1)
    assert watch.wait(done) == []


def test_threads_run_submitted_functions_and_return_errors() -> None:
    with Threads(2, "test", patience_s=10) as pool:
        results = [pool.submit(partial(divmod, 100, number)) for number in range(5)]
        assert isinstance(results[0].exception(), ZeroDivisionError)
        assert [result.result() for result in results[1:]] == [divmod(100, number) for number in range(1, 5)]
    assert not any(thread.is_alive() for thread in pool.threads)


def test_python_exits_although_a_thread_hangs() -> None:
    code = """
import threading
from megabatch.data.pipeline.threads import Threads
with Threads(1, "test", patience_s=0.1) as pool:
    pool.submit(threading.Event().wait)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
