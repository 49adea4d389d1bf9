import io
import itertools
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg  # type: ignore[import-untyped]
import torch
import webdataset  # type: ignore[import-untyped]
from PIL import Image

from megabatch.data.catalog import load_data_set
from megabatch.data.pack import write as packing
from megabatch.data.pack.identity import PackSettings
from megabatch.data.pack.shards import read_shards, verify
from megabatch.data.pack.write import Packed, Progress, pack
from megabatch.data.pipeline.shrink import prepare
from megabatch.data.settings import DataSettings
from megabatch.data.sources.folders import read_folder
from megabatch.errors import UserError
from megabatch.io import disk
from megabatch.io.arrays import read_arrays, write_arrays
from tests.support.disk_events import record_disk_events
from tests.support.pictures import picture, write_files, write_tar

NUM_TRAIN, NUM_VAL = 40, 10


pytestmark = pytest.mark.usefixtures("index_cache")


@pytest.fixture(autouse=True)
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Record syncs instead of waiting for the disk hundreds of times."""
    return record_disk_events(monkeypatch)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Write 50 images of 3 classes: 130 x 100 pixels for training, 64 x 80 for testing; two are not JPEGs."""
    folder = tmp_path / "photos"
    write_files(folder / "train", [f"{'abc'[at % 3]}/{at:03d}.x.JPEG" for at in range(NUM_TRAIN)], size=(130, 100))
    write_files(folder / "val", [f"{'abc'[at % 3]}/{at}.jpg" for at in range(NUM_VAL)], size=(64, 80))
    (folder / "train/a/000.x.JPEG").unlink()
    (folder / "train/a/000.PNG").write_bytes(picture(100, (90, 120), "PNG"))
    (folder / "train/b/001.x.JPEG").unlink()
    (folder / "train/b/001.gif").write_bytes(picture(101, (30, 20), "GIF"))
    return folder


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce a megabyte to 20 kB, so that fifty small images fill several shards."""
    monkeypatch.setattr(packing, "MEGABYTE", 20_000)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".pack.lock"}


def pack_in_pieces(source: Path, out: Path, settings: PackSettings, stops: list[int]) -> Packed:
    """Pack, stopping after each number of images in `stops` and resuming."""
    for stop in stops:

        def show(progress: Progress, stop: int = stop) -> None:
            if progress.images >= stop:
                raise InterruptedError

        with pytest.raises(UserError):
            pack(source, out, settings, show)
    return pack(source, out, settings)


def test_a_pack_has_the_samples_of_the_folder(photos: Path, tmp_path: Path, small_shards: None) -> None:
    packed = pack(photos, tmp_path / "out", PackSettings(shard_mb=1))
    folder, shards = read_folder(photos), read_shards(tmp_path / "out")
    assert folder.class_names == shards.class_names == ("a", "b", "c")
    assert (packed.num_images, packed.num_classes) == (NUM_TRAIN + NUM_VAL, 3) and packed.num_shards > 4
    assert folder.test is not None and shards.test is not None
    for expected, found in ((folder.train, shards.train), (folder.test, shards.test)):
        assert np.array_equal(expected.labels, found.labels)
        assert [expected.content(at) for at in range(len(expected))] == [
            bytes(found.content(at)) for at in range(len(found))
        ]
    assert verify(tmp_path / "out") == []


def test_a_pack_of_a_pack_or_of_its_tars_has_the_same_images(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "one", PackSettings())
    pack(tmp_path / "one", tmp_path / "two", PackSettings())
    first, second = read_shards(tmp_path / "one"), read_shards(tmp_path / "two")
    assert all(first.train.content(at) == second.train.content(at) for at in range(NUM_TRAIN))
    (tmp_path / "one/index.npz").unlink()
    alone = read_shards(tmp_path / "one")
    assert alone.class_names == first.class_names and alone.test is not None and first.test is not None
    for ours, theirs in ((first.train, alone.train), (first.test, alone.test)):
        expected = sorted((bytes(ours.content(at)), int(ours.labels[at])) for at in range(len(ours)))
        assert sorted((bytes(theirs.content(at)), int(theirs.labels[at])) for at in range(len(theirs))) == expected


def test_webdataset_and_tarfile_read_the_shards(photos: Path, tmp_path: Path, small_shards: None) -> None:
    pack(photos, tmp_path / "out", PackSettings(shard_mb=1))
    folder = read_folder(photos)
    expected = {folder.train.content(at): int(folder.train.labels[at]) for at in range(NUM_TRAIN)}
    urls = sorted(str(path) for path in (tmp_path / "out").glob("train-*.tar"))
    assert len(urls) > 3
    found = {}
    keys = []
    for sample in webdataset.WebDataset(urls, shardshuffle=False):
        (image,) = (content for name, content in sample.items() if name in ("jpeg", "jpg", "png", "gif"))
        found[image] = int(sample["cls"])
        keys.append(sample["__key__"])
    assert found == expected
    assert "b/00000026-037_x" in keys  # the number in the source, and the stem without dots
    members = []
    for url in urls:
        with tarfile.open(url) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                members.append((member.name, file.read()))
    images = {name.rpartition(".")[0]: content for name, content in members if not name.endswith(".cls")}
    labels = {name.rpartition(".")[0]: int(content) for name, content in members if name.endswith(".cls")}
    assert {content: labels[name] for name, content in images.items()} == expected
    assert (tmp_path / "out/classes.txt").read_text() == "a\nb\nc\n"


def test_shards_have_samples_in_a_mixed_order(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "out", PackSettings())
    with tarfile.open(tmp_path / "out/train-000000.tar") as tar:
        classes = [name[0] for name in tar.getnames() if not name.endswith(".cls")]
    changes = sum(one != other for one, other in itertools.pairwise(classes))
    assert changes > 15  # of 39; 2 if they were sorted


def test_shards_stay_below_the_limit_and_only_the_last_has_room(
    photos: Path, tmp_path: Path, small_shards: None
) -> None:
    pack(photos, tmp_path / "out", PackSettings(shard_mb=1))
    index = read_arrays(tmp_path / "out/index.npz")
    largest = int(index["length"].max()) + 4 * 512
    train = [path.stat().st_size for path in sorted((tmp_path / "out").glob("train-*.tar"))]
    assert max(train) <= 20_000 and min(train[:-1]) > 20_000 - 2 * largest
    one_each = pack(photos, tmp_path / "tiny", PackSettings(shard_mb=0))
    assert one_each.num_shards == NUM_TRAIN + NUM_VAL  # an image larger than a shard gets a shard to itself


@pytest.mark.parametrize(
    ("width", "height", "size"),
    [
        (130, 100, (52, 40)),
        (100, 130, (40, 52)),
        (900, 400, (90, 40)),
        (41, 41, (40, 40)),
        (1000, 41, (976, 40)),
    ],
)
def test_larger_images_are_resized_to_the_shorter_side(width: int, height: int, size: tuple[int, int]) -> None:
    for form in ("JPEG", "PNG"):
        stored = prepare(picture(1, (width, height), form), 40, 90)
        found = Image.open(io.BytesIO(stored.content))
        assert found.format == "JPEG" and stored.suffix == ".jpg"
        assert found.size == (stored.width, stored.height) == size
        expected = Image.open(io.BytesIO(picture(1, (width, height), form))).convert("RGB")
        reference = np.asarray(expected.resize(found.size, Image.Resampling.BILINEAR)).astype(int)
        assert abs(np.asarray(found).astype(int) - reference).mean() < 6  # two lossy steps


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "WEBP"])
@pytest.mark.parametrize("shorter_side", [None, 16, 17])
def test_smaller_images_are_not_changed(form: str, shorter_side: int | None) -> None:
    content = picture(2, (20, 16), form)
    stored = prepare(content, shorter_side, 90)
    assert stored.content is content and (stored.width, stored.height, stored.suffix) == (20, 16, None)


def test_a_test_size_with_more_pixels_than_the_pack_is_refused(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "out", PackSettings(shorter_side=40))

    def load(image_size: int = 24, **more: object) -> None:
        load_data_set(DataSettings(source=str(tmp_path / "out"), image_size=image_size, **more))  # type: ignore[arg-type]

    load(test_image_size=40)
    load(test_image_size=30, center_crop=0.75)
    with pytest.raises(UserError, match=r"=41: .*--shorter-side 40; nearest: data\.test_image_size=40, or .* 41$"):
        load(test_image_size=41)
    with pytest.raises(UserError, match=r"data\.center_crop=0\.75 is 30; nearest: .*=30, or .*--shorter-side 43$"):
        load(test_image_size=32, center_crop=0.75)
    load(image_size=41, test_image_size=40)
    with pytest.raises(UserError, match=r"^data\.image_size=41: .*; nearest: data\.image_size=40, or "):
        load(image_size=41, sizes=[(0, 16), (0.5, 41)])
    pack(photos, tmp_path / "whole", PackSettings())
    load_data_set(DataSettings(source=str(tmp_path / "whole"), image_size=24, test_image_size=400))


def test_the_index_has_the_stored_image_sizes(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "out", PackSettings(shorter_side=70))
    index, dataset = read_arrays(tmp_path / "out/index.npz"), read_shards(tmp_path / "out")
    assert dataset.test is not None
    parts = [dataset.train.content(at) for at in range(NUM_TRAIN)] + [dataset.test.content(at) for at in range(NUM_VAL)]
    sizes = [Image.open(io.BytesIO(content)).size for content in parts]
    assert list(zip(index["width"], index["height"], strict=True)) == sizes
    assert set(sizes) == {(91, 70), (70, 93), (30, 20), (64, 80)}
    pixels = simplejpeg.decode_jpeg(dataset.train.content(5))
    assert min(pixels.shape[:2]) == 70


def test_quality_is_passed_to_the_encoder(tmp_path: Path) -> None:
    content = picture(3, (200, 200))
    assert len(prepare(content, 100, 95).content) > len(prepare(content, 100, 50).content)


@pytest.mark.parametrize("stops", [[1], [13, 14, 30], [NUM_TRAIN + 3], [NUM_TRAIN + NUM_VAL]])
@pytest.mark.parametrize("shorter_side", [None, 70])
def test_a_pack_stopped_anywhere_resumes_to_the_same_bytes(
    photos: Path, tmp_path: Path, small_shards: None, stops: list[int], shorter_side: int | None
) -> None:
    settings = PackSettings(shard_mb=1, shorter_side=shorter_side)
    pack(photos, tmp_path / "whole", settings)
    pack_in_pieces(photos, tmp_path / "pieces", settings, stops)
    assert bytes_of(tmp_path / "pieces") == bytes_of(tmp_path / "whole")


def test_whole_shards_are_not_packed_again(photos: Path, tmp_path: Path, small_shards: None) -> None:
    packed = pack_in_pieces(photos, tmp_path / "out", PackSettings(shard_mb=1), [35])
    assert packed.progress is not None and 10 < packed.progress.num_resumed < 35
    assert packed.progress.images == packed.progress.total == NUM_TRAIN + NUM_VAL


KILLED = """
import os, signal, sys
from pathlib import Path
from megabatch.data.pack import write as packing
from megabatch.data.pack.identity import PackSettings

packing.MEGABYTE = 20_000
os.fsync = lambda descriptor: None
source, out, *events = sys.argv[1:]

def pack_until(name, count, out):
    seen = 0
    def audit(event, arguments):
        nonlocal seen
        if event == name and str(arguments[0]).startswith(out):
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(audit)
    packing.pack(Path(source), Path(out), PackSettings(shard_mb=1))

for event in events:
    name, count = event.split("-")
    child = os.fork()  # no thread has started yet
    if child == 0:
        pack_until(name, int(count), f"{out}/{event}")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, event
"""


def test_a_pack_killed_at_any_file_operation_resumes_to_the_same_bytes(
    photos: Path, tmp_path: Path, small_shards: None
) -> None:
    """Kill with SIGKILL just before a rename (of a record, a shard or the index) or a removal."""
    settings = PackSettings(shard_mb=1)
    pack(photos, tmp_path / "whole", settings)
    num_shards = len(list((tmp_path / "whole").glob("*.tar")))
    num_renames = 2 * num_shards + 3  # .pack.json, a record and the tar of each shard, classes.txt, index.npz
    num_removals = num_shards  # of records
    events = [f"os.rename-{count}" for count in (2, 5, num_renames)] + [f"os.remove-{num_removals}"]
    command = [sys.executable, "-c", KILLED, str(photos), str(tmp_path / "killed"), *events]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    for event in events:
        assert (tmp_path / "killed" / event / ".pack.json").exists()
        pack(photos, tmp_path / "killed" / event, settings)
        assert bytes_of(tmp_path / "killed" / event) == bytes_of(tmp_path / "whole")


def test_files_are_synced_before_renames_and_records_before_shards(
    photos: Path, tmp_path: Path, synced: list[tuple[str, str]]
) -> None:
    pack(photos, tmp_path / "out", PackSettings())
    record, shard = (f".writing-{name}" for name in (".train-000000.npz", "train-000000.tar"))
    assert synced[synced.index(("sync", record)) :][:6] == [
        ("sync", record),
        ("rename", ".train-000000.npz"),
        ("sync", "out"),
        ("sync", shard),
        ("rename", "train-000000.tar"),
        ("sync", "out"),
    ]
    assert [name for kind, name in synced if kind == "rename"][-1] == "index.npz"


def test_an_unfinished_pack_is_not_read(photos: Path, tmp_path: Path, small_shards: None) -> None:
    with pytest.raises(UserError, match="Interrupted"):
        pack(photos, tmp_path / "out", PackSettings(shard_mb=1), stop_at(30))
    with pytest.raises(UserError, match=r"out is an unfinished pack; .*same"):
        read_shards(tmp_path / "out")


def stop_at(images: int) -> Callable[[Progress], None]:
    def show(progress: Progress) -> None:
        if progress.images == images:
            raise InterruptedError("Interrupted")

    return show


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (PackSettings(shorter_side=50), r"out was packed with --shorter-side not given, now it is 50; give the same"),
        (PackSettings(quality=80), r"out was packed with --quality 90, now it is 80; give the same .*another folder"),
        (PackSettings(shard_mb=2), r"out was packed with --shard-mb 256, now it is 2"),
    ],
)
def test_other_options_for_the_same_folder_are_refused(
    photos: Path, tmp_path: Path, other: PackSettings, message: str, finished: bool
) -> None:
    if finished:
        pack(photos, tmp_path / "out", PackSettings())
    else:
        with pytest.raises(UserError):
            pack(photos, tmp_path / "out", PackSettings(), stop_at(20))
    before = bytes_of(tmp_path / "out")
    with pytest.raises(UserError, match=message):
        pack(photos, tmp_path / "out", other)
    write_files(photos, ["train/a/new.jpg"])
    with pytest.raises(UserError, match=r"'photos' with other files .*another"):
        pack(photos, tmp_path / "out", PackSettings())
    assert bytes_of(tmp_path / "out") == before


def test_a_finished_pack_is_not_changed(photos: Path, tmp_path: Path) -> None:
    assert pack(photos, tmp_path / "out", PackSettings()).progress is not None
    before = times_of(tmp_path / "out")
    again = pack(photos, tmp_path / "out", PackSettings(on_error="skip"))
    assert again.progress is None and again.num_images == NUM_TRAIN + NUM_VAL
    assert times_of(tmp_path / "out") == before


def times_of(folder: Path) -> dict[str, int]:
    """Return the modification time of each file except the lock, which names its last holder."""
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != ".pack.lock"}


def test_unsuitable_output_folders_are_refused(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "PATIENCE_S", 0.1)
    for inside in (photos, photos / "out", photos / "train/../out"):
        with pytest.raises(UserError, match=r"is inside .*photos, the source"):
            pack(photos, inside, PackSettings())
    (tmp_path / "full").mkdir()
    (tmp_path / "full/other.txt").write_text("dear")
    with pytest.raises(UserError, match=r"full is neither empty .*other.txt; .*new"):
        pack(photos, tmp_path / "full", PackSettings())
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["other.txt"]
    np.savez(tmp_path / "full/index.npz", a=np.zeros(1))
    with pytest.raises(UserError, match=r"full/index.npz is damaged"):
        pack(photos, tmp_path / "full", PackSettings())
    with pytest.raises(UserError, match=r"other.txt/out cannot be written \(Not a directory\);"):
        pack(photos, tmp_path / "full/other.txt/out", PackSettings())
    message = rf"full is being packed by process {os.getpid()}; wait for it, or give another folder"
    with disk.take_lock(tmp_path / "full/.pack.lock"), pytest.raises(UserError, match=message):
        pack(photos, tmp_path / "full", PackSettings())


def test_a_full_disk_raises_one_line_and_loses_nothing(
    photos: Path, tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = packing.ShardWriter.write
    room = 60_000

    def limited(self: packing.ShardWriter, rest: bytes) -> None:
        nonlocal room
        room -= len(rest)
        if room < 0:
            raise OSError(28, "No space left on device")
        write(self, rest)

    settings = PackSettings(shard_mb=1)
    with monkeypatch.context() as patched:
        patched.setattr(packing.ShardWriter, "write", limited)
        with pytest.raises(UserError, match=r"out cannot be written \(No space.*same command"):
            pack(photos, tmp_path / "out", settings)
    assert not list((tmp_path / "out").glob(".writing-*")) and list((tmp_path / "out").glob("*.tar"))
    pack(photos, tmp_path / "out", settings)
    pack(photos, tmp_path / "whole", settings)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


@pytest.fixture
def damaged(photos: Path) -> Path:
    """Damage three images: one is not an image, one is empty, one is truncated."""
    (photos / "train/a/003.x.JPEG").write_bytes(b"no image at all")
    (photos / "train/c/005.x.JPEG").write_bytes(b"")
    content = (photos / "val/b/1.jpg").read_bytes()
    (photos / "val/b/1.jpg").write_bytes(content[: len(content) // 2])
    return photos


@pytest.mark.parametrize("shorter_side", [None, 50])
def test_an_unreadable_image_is_named(damaged: Path, tmp_path: Path, shorter_side: int | None) -> None:
    message = r"photos/(train/a/003.x.JPEG: it is not in a format|train/c/005.x.JPEG: it is empty).*; .*--on-error skip"
    with pytest.raises(UserError, match=message):
        pack(damaged, tmp_path / "out", PackSettings(shorter_side=shorter_side))


def test_skipped_images_are_named_and_the_same_after_a_stop(damaged: Path, tmp_path: Path, small_shards: None) -> None:
    settings = PackSettings(shard_mb=1, on_error="skip")
    packed = pack(damaged, tmp_path / "whole", settings)
    again = pack_in_pieces(damaged, tmp_path / "pieces", settings, [7, 38, 49])
    assert bytes_of(tmp_path / "pieces") == bytes_of(tmp_path / "whole")
    assert packed.progress is not None and again.progress is not None
    assert packed.progress.skipped == again.progress.skipped and packed.num_images == NUM_TRAIN + NUM_VAL - 3
    assert sorted(line.partition("photos/")[2].partition(":")[0] for line in packed.progress.skipped) == [
        "train/a/003.x.JPEG",
        "train/c/005.x.JPEG",
        "val/b/1.jpg",
    ]
    assert packed.progress.read_bytes == again.progress.read_bytes
    folder, shards = read_folder(damaged), read_shards(tmp_path / "whole")
    numbers = read_arrays(tmp_path / "whole/index.npz")["number"]
    assert len(shards.train) == NUM_TRAIN - 2
    for at in range(len(shards.train)):
        assert folder.train.content(int(numbers[at])) == shards.train.content(at)


def test_a_pack_stopped_by_an_unreadable_image_resumes_with_skip(
    damaged: Path, tmp_path: Path, small_shards: None
) -> None:
    with pytest.raises(UserError, match="--on-error skip"):
        pack(damaged, tmp_path / "out", PackSettings(shard_mb=1))
    pack(damaged, tmp_path / "out", PackSettings(shard_mb=1, on_error="skip"))
    pack(damaged, tmp_path / "whole", PackSettings(shard_mb=1, on_error="skip"))
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


def test_a_set_of_only_unreadable_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photos/a").mkdir(parents=True)
    (tmp_path / "photos/a/1.jpg").write_bytes(b"x")
    with pytest.raises(UserError, match=r"none of the 1 images .*a/1.jpg: .*format"):
        pack(tmp_path / "photos", tmp_path / "out", PackSettings(on_error="skip"))


def test_an_unreadable_image_in_a_tar_is_named_with_its_offset(tmp_path: Path) -> None:
    write_tar(tmp_path / "in/x.tar", [("a.jpg", b"broken"), ("a.cls", "0")])
    with pytest.raises(UserError, match=r"in/x.tar at offset 512 \(a.jpg\): .*format"):
        pack(tmp_path / "in", tmp_path / "out", PackSettings())


def test_member_names_of_a_pack_stay_inside_the_folder_when_unpacked(tmp_path: Path) -> None:
    members: list[tuple[str, Any]] = [
        ("../../evil.jpg", picture(0)),
        ("../../evil.cls", ".."),
        ("/b.c.jpg/x.jpg", picture(1)),
    ]
    write_tar(tmp_path / "in/x.tar", [*members, ("/b.c.jpg/x.cls", "/etc/a")])
    pack(tmp_path / "in", tmp_path / "out", PackSettings())
    with tarfile.open(tmp_path / "out/train-000000.tar") as tar:
        names = sorted(name for name in tar.getnames() if name.endswith("jpg"))
    assert names == ["__/00000000-evil.jpg", "_etc_a/00000001-x.jpg"]
    assert read_shards(tmp_path / "out").class_names == ("..", "/etc/a")


def test_every_flipped_byte_is_found_and_named(photos: Path, tmp_path: Path, small_shards: None) -> None:
    out = tmp_path / "out"
    pack(photos, out, PackSettings(shard_mb=1))
    index = read_arrays(out / "index.npz")
    generator = np.random.default_rng(0)
    for at in generator.integers(0, len(index["label"]), 5):
        shard = out / str(index["shards"][index["shard"][at]])
        whole = shard.read_bytes()
        offset, length = int(index["offset"][at]), int(index["length"][at])
        for place, message in (
            (offset, f"{shard} at offset {offset} ("),
            (offset + length - 1, f"{shard} at offset {offset} ("),
            (offset - 500, f"{shard}: names or labels between its images"),
            (len(whole) - 1, f"{shard}: names or labels between its images"),
        ):
            shard.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            (line,) = verify(out)
            assert line.startswith(message)
        shard.write_bytes(whole)
    assert verify(out) == []


def test_an_index_that_does_not_match_its_shards_is_refused(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack(photos, out, PackSettings())
    shard, size = out / "val-000000.tar", (out / "val-000000.tar").stat().st_size
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    message = rf"val-000000.tar has {size - 1:,} bytes, but index.npz expects {size:,} bytes.* copy the pack again, or"
    for use in (read_shards, verify):
        with pytest.raises(UserError, match=message):
            use(out)  # type: ignore[operator]
    shard.unlink()
    with pytest.raises(UserError, match=r"val-000000.tar is missing, but index.npz expects"):
        read_shards(out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": np.array(2)}, r"index.npz has format 2, .*reads format 1; pack again, or update"),
        ({"label": np.full(NUM_TRAIN + NUM_VAL, 3)}, r"index.npz is damaged \(a label has no class name\); pack again"),
        ({"shard": np.full(NUM_TRAIN + NUM_VAL, 2)}, r"is damaged \(it refers to a shard that it does not list\)"),
        ({"offset": np.full(NUM_TRAIN + NUM_VAL, 1 << 40)}, r"is damaged \(a sample is outside of its shard\)"),
        ({"length": np.zeros(3, np.int64)}, r"is damaged \(its columns differ in length\)"),
        ({"shards": np.array(["../../etc/passwd", "b"])}, r"is damaged \(the name of a shard is not a file name\)"),
        ({"crc32": None}, r"is damaged \('crc32"),
        ({"offset": np.full(NUM_TRAIN + NUM_VAL, 2**64 - 1, np.uint64)}, r"is damaged \(a column has numbers outside"),
        ({"length": np.full(NUM_TRAIN + NUM_VAL, 2**63 - 1)}, r"is damaged \(a sample is outside of its shard\)"),
        ({"offset": np.full(NUM_TRAIN + NUM_VAL, 2**63 - 1)}, r"is damaged \(a sample is outside of its shard\)"),
        ({"sizes": np.array([-1, -1])}, r"is damaged \(a sample is outside of its shard\)"),
        ({"split": np.full(NUM_TRAIN + NUM_VAL, 7)}, r"is damaged \(it has no training images, or a split that is"),
        ({"format": np.array([1, 1])}, r"is damaged \(int64 of shape \(2,\) is not an integer\)"),
        ({"shards": np.array(["a\nb", "b"])}, r"is damaged \(the name of a shard is not a file name\)"),
        ({"class_names": np.array(["a", "\x1b[2J", "c"])}, r"class 1 is named .*; expected .*characters"),
        ({"rest_crc32": np.array([1])}, r"is damaged \(the number of checksums differs"),
    ],
)
def test_an_invalid_index_is_refused_with_a_reason(
    photos: Path, tmp_path: Path, change: dict[str, np.ndarray | None], message: str
) -> None:
    pack(photos, tmp_path / "out", PackSettings())
    path = tmp_path / "out/index.npz"
    index = read_arrays(path) | change
    write_arrays(path, {name: array for name, array in index.items() if array is not None})
    with pytest.raises(UserError, match=message):
        read_shards(tmp_path / "out")


def test_a_damaged_index_is_refused(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "out", PackSettings())
    path = tmp_path / "out/index.npz"
    whole = path.read_bytes()
    for place in (0, 300, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:place] + bytes(20) + whole[place + 20 :])
        with pytest.raises(UserError, match=r"index.npz is damaged"):
            read_shards(tmp_path / "out")
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"index.npz is damaged"):
        read_shards(tmp_path / "out")


def test_the_index_is_not_a_pickle_and_does_not_depend_on_the_number_of_threads(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(photos, tmp_path / "many", PackSettings(shorter_side=50))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    pack(photos, tmp_path / "one", PackSettings(shorter_side=50))
    assert bytes_of(tmp_path / "many") == bytes_of(tmp_path / "one")
    with np.load(tmp_path / "one/index.npz", allow_pickle=False) as archive:
        assert all(archive[name].dtype.kind in "iuU" for name in archive.files)


def test_packing_starts_no_openmp_teams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread of the pool would start a team with one thread per core."""

    def count_threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    write_files(
        tmp_path / "photos", [f"a/{at}.{suffix}" for at in range(8) for suffix in ("jpg", "png")], size=(600, 400)
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    num_torch = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        num_before, counts = count_threads(), []
        settings = PackSettings(shorter_side=300)
        pack(tmp_path / "photos", tmp_path / "out", settings, lambda progress: counts.append(count_threads()))
        assert max(counts) <= num_before + 2
    finally:
        torch.set_num_threads(num_torch)
