"""Images decoded in a separate process are those of threads, and so are errors and time limits."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from megabatch.data.catalog import load_data_set
from megabatch.data.pack.identity import PackSettings
from megabatch.data.pack.write import pack
from megabatch.data.pipeline.batches import TrainingImages, evaluation_batches
from megabatch.data.pipeline.decoder_process import DecoderProcess
from megabatch.data.pipeline.encoded import EncodedImages
from megabatch.data.pipeline.images import PixelStatistics
from megabatch.data.pipeline.reader import BatchRequest, Reader
from megabatch.data.settings import AugmentSettings, DataSettings
from megabatch.errors import UserError
from megabatch.planning.batch import BatchSettings, plan_steps
from tests.support.photos import HangingFiles, make_folder
from tests.support.processes import is_alive, wait_until

pytestmark = pytest.mark.usefixtures("index_cache")
STEPS, BATCH = 6, 5
PIXELS = PixelStatistics((120.0, 110.0, 100.0), (60.0, 50.0, 40.0))
RAND = AugmentSettings(policy="rand_augment_timm", magnitude_std=0.5, erase=0.5)


@pytest.fixture(scope="module")
def decoder() -> Iterator[DecoderProcess]:
    """A process for all tests here: it takes seconds to start."""
    with DecoderProcess() as process:
        process.start()
        yield process


@contextmanager
def decoded_in(decoder: DecoderProcess | None, images: EncodedImages) -> Iterator[EncodedImages]:
    images.decoder = decoder
    yield images
    images.decoder = None


def settings_of(source: Path, **more: object) -> DataSettings:
    chosen = {"source": str(source), "image_size": 24, "crop_area": 0.2, "flip": True, "validation": 0.25} | more
    return DataSettings(**chosen)  # type: ignore[arg-type]


def read(settings: DataSettings, decoder: DecoderProcess | None, first_step: int = 0) -> list[object]:
    """Return what a run reads: training batches from a step on, then the test images."""
    data = load_data_set(settings, threads=2)
    plan = plan_steps(BatchSettings(global_batch=BATCH, microbatch=BATCH), 1, len(data.train), 1)
    plan = type(plan)(**{name: getattr(plan, name) for name in plan.__struct_fields__} | {"num_steps": STEPS})
    assert isinstance(data.train, EncodedImages) and isinstance(data.test, EncodedImages)
    found: list[object] = []
    with decoded_in(decoder, data.train) as train, decoded_in(decoder, data.test) as test:
        with TrainingImages(train, settings, 7, plan, pixels=PIXELS).stream(0, first_step) as stream:
            for _ in range(first_step, STEPS):
                images, labels = stream.next()
                found.append((images.tolist(), labels.tolist(), stream.take_waits()[1]))
        for number, batch in evaluation_batches(test, 4, 0, 1):
            found.append((number, batch.images.tolist(), batch.labels.tolist(), batch.skipped))
    return found


@pytest.mark.parametrize(
    "more",
    [{"sizes": [(0.0, 16), (0.6, 24)], "test_image_size": 32}, {"crop_area": None, "crop_padding": 3, "augment": RAND}],
)
def test_process_gives_the_batches_of_threads_and_resumes(
    tmp_path: Path, decoder: DecoderProcess, more: dict[str, object]
) -> None:
    settings = settings_of(make_folder(tmp_path / "set"), **more)
    expected = read(settings, None)
    assert read(settings, decoder) == expected
    assert read(settings, decoder, first_step=4) == expected[4:]


def test_packs_and_joined_folders_are_decoded_in_the_process(tmp_path: Path, decoder: DecoderProcess) -> None:
    folder, other = make_folder(tmp_path / "set"), make_folder(tmp_path / "other")
    pack(folder, tmp_path / "packed", PackSettings())
    settings = settings_of(tmp_path / "packed", also=[str(other)], train_per_class=6)
    assert read(settings, decoder) == read(settings, None)


def test_unreadable_images_are_skipped_or_named_as_by_threads(tmp_path: Path, decoder: DecoderProcess) -> None:
    folder = make_folder(tmp_path / "set")
    for path in sorted(folder.rglob("*.jpg"))[::4]:
        path.write_bytes(b"text")
    skipping = settings_of(folder, on_error="skip")
    expected = read(skipping, None)
    assert "cannot be read" in str(expected) and read(skipping, decoder) == expected
    with pytest.raises(UserError, match=r"\.jpg cannot be read: .*data\.on_error=skip"):
        read(settings_of(folder), decoder)


@pytest.mark.parametrize("on_error", ["skip", "raise"])
def test_an_image_that_hangs_is_skipped_or_named(tmp_path: Path, decoder: DecoderProcess, on_error: str) -> None:
    folder = make_folder(tmp_path / "set")
    settings = settings_of(folder, validation=0.25, on_error=on_error, image_timeout_s=1)
    files = load_data_set(settings).train.files  # type: ignore[attr-defined]
    number = 6
    with decoded_in(decoder, EncodedImages(HangingFiles(files, number), settings, 2)) as images:
        whole = EncodedImages(files, settings).read(np.delete(np.arange(len(files)), number))
        chunks = [partial(BatchRequest, chunk, None) for chunk in np.array_split(np.arange(len(files)), 3)]
        if on_error == "raise":
            with pytest.raises(UserError, match=r"cannot be read: it takes longer than data\.image_timeout_s=1;"):
                list(Reader(images).prefetch(chunks, 5))
            return
        with closing(Reader(images).prefetch(chunks, 5)) as batches:
            found = [(batch.images.clone(), batch.skipped) for batch in batches]
    assert torch.equal(torch.cat([pixels for pixels, _ in found]), whole)
    (skipped,) = [line for _, lines in found for line in lines]
    assert files.where(number) in skipped and "it takes longer than" in skipped


def test_memory_is_reused_and_released(tmp_path: Path, decoder: DecoderProcess) -> None:
    settings = settings_of(make_folder(tmp_path / "set"))
    data = load_data_set(settings, threads=2)
    plan = plan_steps(BatchSettings(global_batch=BATCH, microbatch=BATCH), 1, len(data.train), 20)
    mapped = count_mapped()
    assert isinstance(data.train, EncodedImages)
    with (
        decoded_in(decoder, data.train) as images,
        TrainingImages(images, settings, 7, plan).stream(0) as stream,
    ):
        places = {stream.next()[0].data_ptr() for _ in range(25)}
        assert len(places) == count_mapped() - mapped <= 8
    assert count_mapped() == mapped


def count_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:megabatch-images")


def test_end_of_the_process_is_reported(tmp_path: Path) -> None:
    settings = settings_of(make_folder(tmp_path / "set"))
    data = load_data_set(settings, threads=2)
    plan = plan_steps(BatchSettings(global_batch=BATCH, microbatch=BATCH), 1, len(data.train), 100)
    assert isinstance(data.train, EncodedImages)
    with (
        DecoderProcess() as decoder,
        decoded_in(decoder, data.train) as images,
        TrainingImages(images, settings, 7, plan).stream(0) as stream,
    ):
        stream.next()
        assert decoder.process
        decoder.process.kill()
        with pytest.raises(RuntimeError, match=r"decodes.*SIGKILL.*dmesg"):
            for _ in range(100):
                stream.next()


KILLED = """
import sys
from functools import partial
import numpy as np
from megabatch.data.catalog import load_data_set
from megabatch.data.pipeline.decoder_process import DecoderProcess
from megabatch.data.pipeline.encoded import EncodedImages
from megabatch.data.pipeline.images import PixelStatistics
from megabatch.data.pipeline.reader import BatchRequest, Reader
from megabatch.data.settings import AugmentSettings, DataSettings
from tests.support.photos import HangingFiles

settings = DataSettings(source=sys.argv[1], image_size=24, validation=0.25)
files = load_data_set(settings).train.files
images = EncodedImages(HangingFiles(files, 7), settings, 2)
images.decoder = DecoderProcess()
chunks = [partial(BatchRequest, chunk, None) for chunk in np.array_split(np.arange(len(files)), 2)]
for batch in Reader(images).prefetch(chunks, 9):
    print(images.decoder.process.pid, flush=True)
"""


def test_process_ends_with_its_rank(tmp_path: Path) -> None:
    """Even if the rank is killed, and while an image hangs."""
    folder = make_folder(tmp_path / "set")
    command = [sys.executable, "-c", KILLED, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as rank:
        assert rank.stdout
        decoder = int(rank.stdout.readline())
        assert is_alive(decoder)
        rank.kill()
    wait_until(lambda: not is_alive(decoder))
