"""CIFAR's binary version, written as it is documented: labels, then the planes of red, green and blue."""

import io
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from megabatch.data.catalog import load_data_set
from megabatch.data.settings import DataSettings
from megabatch.errors import UserError

RNG = np.random.default_rng(1)
IMAGES: NDArray[np.uint8] = RNG.integers(0, 256, (12, 3, 32, 32), np.uint8)
LABELS: NDArray[np.uint8] = (np.arange(12) % 3).astype(np.uint8)


def records(at: slice, coarse: bool = False) -> bytes:
    return b"".join(
        bytes([7] * coarse + [label]) + image.tobytes() for label, image in zip(LABELS[at], IMAGES[at], strict=True)
    )


def cifar10() -> dict[str, bytes]:
    batches = {f"data_batch_{number + 1}.bin": records(slice(2 * number, 2 * number + 2)) for number in range(5)}
    return {**batches, "test_batch.bin": records(slice(10, 12)), "batches.meta.txt": b"airplane\nbird\ncat\n\n"}


def cifar100() -> dict[str, bytes]:
    return {
        "train.bin": records(slice(0, 10), coarse=True),
        "test.bin": records(slice(10, 12), coarse=True),
        "fine_label_names.txt": b"airplane\nbird\ncat\n",
        "coarse_label_names.txt": b"thing\n",
    }


def write(files: dict[str, bytes], path: Path, packed: bool) -> Path:
    if not packed:
        path.mkdir()
        for name, content in files.items():
            (path / name).write_bytes(content)
        return path
    with tarfile.open(path.with_suffix(".tar.gz"), "w:gz") as made:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    return path.with_suffix(".tar.gz")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("files", [cifar10(), cifar100()], ids=["cifar10", "cifar100"])
def test_images_and_labels_are_those_that_were_written(tmp_path: Path, files: dict[str, bytes], packed: bool) -> None:
    data = load_data_set(DataSettings(source=str(write(files, tmp_path / "cifar", packed)), image_size=32))
    assert data.class_names == ("airplane", "bird", "cat")
    for part, at in ((data.train, slice(0, 10)), (data.test, slice(10, 12))):
        assert np.array_equal(part.read(np.arange(len(part))).numpy(), IMAGES[at])
        assert np.array_equal(part.labels.numpy(), LABELS[at])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"data_batch_3.bin": b""}, None),
        ({"data_batch_3.bin": records(slice(0, 1))[:-1]}, "not a multiple of 3,073"),
        ({"test_batch.bin": b""}, "test images have 0 bytes"),
        ({"test_batch.bin": None}, "no test_batch.bin"),
        ({"batches.meta.txt": b"airplane\nbird\n"}, "label 2 but only 2 class_names"),
        ({"batches.meta.txt": None, "batches.meta": b"\x80\x02}"}, "not the version for Python"),
    ],
)
def test_incomplete_files_are_refused_in_one_line(
    tmp_path: Path, change: dict[str, bytes | None], reason: str | None
) -> None:
    files = {name: content for name, content in (cifar10() | change).items() if content is not None}
    settings = DataSettings(source=str(write(files, tmp_path / "cifar", packed=False)), image_size=32)
    if reason is None:
        assert len(load_data_set(settings).train) == 8
        return
    with pytest.raises(UserError, match=re.escape(reason)) as error:
        load_data_set(settings)
    assert "\n" not in str(error.value)


def test_archive_of_something_else_is_refused_in_one_line(tmp_path: Path) -> None:
    path = write({"notes.txt": b"hello"}, tmp_path / "notes", packed=True)
    with pytest.raises(UserError, match=r"no batches\.meta\.txt"):
        load_data_set(DataSettings(source=str(path), image_size=32))
