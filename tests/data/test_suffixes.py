"""Images of every suffix, from folders and tars, survive packing, and WebDataset reads them."""

import io
from pathlib import Path

import numpy as np
import pytest
import webdataset  # type: ignore[import-untyped]
from PIL import Image

from megabatch.data.catalog import load_data_set, read_encoded
from megabatch.data.pack.identity import PackSettings
from megabatch.data.pack.shards import verify
from megabatch.data.pack.write import pack
from megabatch.data.settings import DataSettings
from megabatch.data.sources.files import IMAGE_SUFFIXES, EncodedDataset
from tests.support.disk_events import record_disk_events
from tests.support.pictures import picture, write_tar

SUFFIXES = [*IMAGE_SUFFIXES, ".JPEG", ".JPG", ".Png"]
NUM_IMAGES = 6

pytestmark = pytest.mark.usefixtures("index_cache")


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    record_disk_events(monkeypatch)


def contents_of(suffix: str) -> list[bytes]:
    form = Image.registered_extensions()[suffix.lower()]
    return [picture(number, (40, 30), form) for number in range(NUM_IMAGES)]


def write_source(kind: str, place: Path, suffix: str) -> None:
    """Write images of two alternating classes, as files or as a WebDataset tar."""
    contents = contents_of(suffix)
    if kind == "tar":
        members = [(f"{number}{suffix}", content) for number, content in enumerate(contents)]
        labels = [(f"{number}.cls", "ab"[number % 2]) for number in range(NUM_IMAGES)]
        write_tar(place / "x.tar", [*members, *labels])
        return
    for number, content in enumerate(contents):
        path = place / "ab"[number % 2] / f"{number}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def images_of(dataset: EncodedDataset) -> list[tuple[bytes, str]]:
    train = dataset.train
    return [(bytes(train.content(at)), dataset.class_names[train.labels[at]]) for at in range(len(train))]


def read_with_webdataset(folder: Path) -> list[tuple[str, bytes, int]]:
    """Return the key of each image, its pixels as Pillow decodes them, and its label."""
    shards = sorted(str(path) for path in folder.glob("*.tar"))
    found = []
    for sample in webdataset.WebDataset(shards, shardshuffle=False).decode("pil"):
        (key,) = (key for key, value in sample.items() if isinstance(value, Image.Image))
        found.append((key, sample[key].convert("RGB").tobytes(), sample["cls"]))
    return found


@pytest.mark.parametrize("kind", ["folder", "tar"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_packing_keeps_images_of_every_suffix(tmp_path: Path, suffix: str, kind: str) -> None:
    write_source(kind, tmp_path / "in", suffix)
    source = read_encoded(tmp_path / "in")
    assert sorted(images_of(source)) == sorted(
        (content, "ab"[number % 2]) for number, content in enumerate(contents_of(suffix))
    )
    pack(tmp_path / "in", tmp_path / "out", PackSettings())
    assert images_of(read_encoded(tmp_path / "out")) == images_of(source) and verify(tmp_path / "out") == []
    (tmp_path / "out/index.npz").unlink()
    assert sorted(images_of(read_encoded(tmp_path / "out"))) == sorted(images_of(source))


@pytest.mark.parametrize("shorter_side", [None, 20])
@pytest.mark.parametrize("suffix", [suffix for suffix in SUFFIXES if suffix != ".avif"])  # which it does not decode
def test_webdataset_reads_images_of_every_suffix(tmp_path: Path, suffix: str, shorter_side: int | None) -> None:
    """JPEGs have the key `jpg`, the usual one."""
    write_source("folder", tmp_path / "in", suffix)
    pack(tmp_path / "in", tmp_path / "out", PackSettings(shorter_side=shorter_side))
    found = read_with_webdataset(tmp_path / "out")
    is_jpeg = shorter_side is not None or suffix.lower() in (".jpg", ".jpeg")
    assert {key for key, _, _ in found} == {"jpg" if is_jpeg else suffix.lower()[1:]}
    expected = [
        (Image.open(io.BytesIO(content)).convert("RGB").tobytes(), "ab".index(name))
        for content, name in images_of(read_encoded(tmp_path / "out"))
    ]
    assert len(found) == NUM_IMAGES and sorted((pixels, label) for _, pixels, label in found) == sorted(expected)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_images_of_every_suffix_are_decoded_for_training(tmp_path: Path, suffix: str) -> None:
    write_source("folder", tmp_path / "in", suffix)
    data = load_data_set(DataSettings(source=str(tmp_path / "in"), image_size=30, center_crop=1.0, validation=0.3))
    numbers = [int(Path(data.train.files.where(at)).stem) for at in range(len(data.train))]  # type: ignore[attr-defined]
    for pixels, number in zip(data.train.read(np.arange(len(numbers))), numbers, strict=True):
        image = Image.open(io.BytesIO(contents_of(suffix)[number])).convert("RGB")
        assert np.array_equal(pixels.permute(1, 2, 0).numpy(), np.asarray(image)[:, 5:35])
