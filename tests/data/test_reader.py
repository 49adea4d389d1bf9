"""Prefetched batches: threads change only the timing, and no sample is lost."""

import statistics
import threading
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from megabatch.config.loading import load_config
from megabatch.data.catalog import load_data_set
from megabatch.data.pack.identity import PackSettings
from megabatch.data.pack.write import pack
from megabatch.data.pipeline.batches import TrainingImages, evaluation_batches, evaluation_request
from megabatch.data.pipeline.device_decoder import DECODERS, FileRead, plan_places, require_gpu
from megabatch.data.pipeline.images import DataSet, ImageSubset, PixelStatistics
from megabatch.data.pipeline.order import Samples
from megabatch.data.pipeline.reader import PREFETCHED, Reader
from megabatch.data.settings import AugmentSettings, DataSettings
from megabatch.errors import UserError
from megabatch.planning.batch import BatchSettings, plan_steps
from megabatch.ranks.machine import resident_mb
from megabatch.runs.records import TimeBreakdown
from tests.support.photos import make_folder, photo

SEED = 7
PIXELS = PixelStatistics((120.0, 110.0, 100.0), (60.0, 50.0, 40.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("photos") / "set", per_class=12)


def settings_of(folder: Path, **more: object) -> DataSettings:
    chosen = {"source": str(folder), "image_size": 24, "crop_area": 0.2, "flip": True, "validation": 0.25} | more
    return DataSettings(**chosen)  # type: ignore[arg-type]


def training(settings: DataSettings, threads: int = 1) -> TrainingImages:
    data = load_data_set(settings, threads)
    plan = plan_steps(BatchSettings(global_batch=10, microbatch=5), 1, len(data.train), 3)
    return TrainingImages(data.train, settings, SEED, plan, pixels=PIXELS)


def all_of(images: TrainingImages, first_step: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    count = 2 * (images.plan.num_steps - first_step)
    with images.stream(0, first_step) as stream:
        return [tuple(tensor.clone() for tensor in stream.next()) for _ in range(count)]  # type: ignore[misc]


def same(ours: list[tuple[torch.Tensor, torch.Tensor]], theirs: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(mine, yours)
        for left, right in zip(ours, theirs, strict=True)
        for mine, yours in zip(left, right, strict=True)
    )


SIZES = {"sizes": [(0.0, 16), (0.4, 12), (0.7, 24)]}


@pytest.mark.parametrize(
    "more",
    [
        SIZES | {"augment": AugmentSettings(policy="trivial_augment_wide", hue=0.1, erase=0.5, erase_with="noise")},
        {"crop_area": None, "crop_padding": 3, "flip": "alternating"} | SIZES,
        {"crop_area": None, "flip": False},
    ],
)
def test_threads_and_resuming_do_not_change_a_pixel(folder: Path, more: dict[str, object]) -> None:
    settings = settings_of(folder, **more)
    images = training(settings)
    expected = [images.microbatch(step, index) for step in range(images.plan.num_steps) for index in (0, 1)]
    for threads in (1, 4):
        assert same(all_of(training(settings, threads)), expected)
    assert same(all_of(training(settings, 2), first_step=4), expected[8:])


def test_a_smaller_stage_has_the_crops_of_a_run_with_that_size(folder: Path) -> None:
    images = training(settings_of(folder, **SIZES), threads=2)
    alike = {side: training(settings_of(folder, image_size=side)) for side in (12, 16, 24)}
    found = all_of(images)
    sides = [pixels.shape[3] for pixels, _ in found]
    steps = images.plan.num_steps
    assert sides == [
        16 if step < 0.4 * steps else 12 if step < 0.7 * steps else 24 for step in range(steps) for _ in "01"
    ]
    for place, (pixels, labels) in enumerate(found):
        assert same([(pixels, labels)], [alike[sides[place]].microbatch(*divmod(place, 2))])


def test_test_images_have_their_size_and_its_center_crop(folder: Path) -> None:
    """The photos are large: 0.875 of the shorter side, at either size."""
    small, large = (load_data_set(settings_of(folder, test_image_size=side)).test for side in (None, 32))
    assert large.read(np.arange(2)).shape == (2, 3, 32, 32)
    alone = load_data_set(settings_of(folder, image_size=32)).test
    assert torch.equal(large.read(np.arange(5)), alone.read(np.arange(5)))
    assert torch.equal(small.read(np.arange(5)), load_data_set(settings_of(folder)).test.read(np.arange(5)))


def test_every_sample_appears_once_per_epoch_with_its_label(folder: Path) -> None:
    images = training(settings_of(folder), threads=3)
    samples = np.concatenate([images.samples(step, index)[0] for step in range(5) for index in (0, 1)])
    count = len(images.images)
    assert sorted(samples[:count]) == list(range(count))
    labels = torch.cat([labels for _, labels in all_of(images)])
    assert torch.equal(labels[: len(samples)], images.images.labels[torch.from_numpy(samples)])


def test_memory_is_reused(folder: Path) -> None:
    with training(settings_of(folder), threads=2).stream(0) as stream:
        places = {stream.next()[0].data_ptr() for _ in range(14)}
    assert len(places) <= PREFETCHED + 1


def test_memory_does_not_grow_with_the_epochs(folder: Path) -> None:
    settings = settings_of(folder, image_size=160)
    data = load_data_set(settings, threads=2)
    plan = plan_steps(BatchSettings(global_batch=9, microbatch=9), 1, len(data.train), 60)
    memory_mb = []
    with TrainingImages(data.train, settings, SEED, plan).stream(0) as stream:
        for _ in range(plan.num_steps):
            stream.next()
            memory_mb.append(resident_mb() or 0.0)
    half = len(memory_mb) // 2
    # The images of 30 epochs take 62 MB.
    assert statistics.median(memory_mb[half:]) - statistics.median(memory_mb[:half]) < 20


def test_threads_end_with_the_stream(folder: Path) -> None:
    before = threading.active_count()
    with training(settings_of(folder), threads=3).stream(0) as stream:
        stream.next()
        assert threading.active_count() > before
    assert threading.active_count() == before


class SlowImages:
    """A custom image set that records which threads read it."""

    labels = torch.zeros(24, dtype=torch.int64)

    def __init__(self) -> None:
        self.threads = set[int]()

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, samples: Samples) -> torch.Tensor:
        self.threads.add(threading.get_ident())
        return torch.zeros(len(samples), 1, 8, 8, dtype=torch.uint8)


def test_a_subset_of_a_custom_set_is_prefetched_like_the_whole_set() -> None:
    for part in (np.arange(24), np.arange(4, 12)):
        slow = SlowImages()
        (batch,) = Reader(ImageSubset(slow, part)).prefetch(iter([partial(evaluation_request, 0, 8)]), 8)
        assert len(batch.labels) == 8 and slow.threads and threading.get_ident() not in slow.threads


def test_a_wait_is_broken_down_by_activity(folder: Path) -> None:
    with training(settings_of(folder)).stream(0) as stream:
        stream.next()
        waited, skipped = stream.take_waits()
        assert waited.total > 0 and min(waited.read, waited.decode, waited.augment) > 0 and not skipped
        assert stream.take_waits()[0] == TimeBreakdown()


def damage(folder: Path, tmp_path: Path, numbers: list[int]) -> tuple[Path, list[str]]:
    """Return a copy in which some images are damaged, each in a different way."""
    copy = make_folder(tmp_path / "damaged", per_class=12)
    paths = [sorted(copy.rglob("*.jpg"))[number] for number in numbers]
    changes = [lambda content: content[:200], lambda content: b"", lambda content: b"text"]
    for change, path in zip(changes, paths, strict=False):
        path.write_bytes(change(path.read_bytes()))
    return copy, [str(path) for path in paths]


def test_an_image_that_cannot_be_read_is_named(folder: Path, tmp_path: Path) -> None:
    copy, (path,) = damage(folder, tmp_path, [4])
    settings = settings_of(copy, validation=0.1, validation_seed=1)
    with pytest.raises(UserError, match=f"{path} cannot be read: .*data.on_error=skip"):
        data = load_data_set(settings)
        data.train.read(np.arange(len(data.train)))
        data.test.read(np.arange(len(data.test)))
    images = training(settings)
    with pytest.raises(UserError, match=f"{path} cannot be read: "):
        all_of(images)
        images_of_evaluation(load_data_set(settings))


def images_of_evaluation(data: DataSet) -> tuple[torch.Tensor, list[str]]:
    batches = [batch for _, batch in evaluation_batches(data.test, 4, 0, 1)]
    return torch.cat([batch.labels for batch in batches]), [line for batch in batches for line in batch.skipped]


def test_skipping_keeps_batch_sizes_and_all_other_images(folder: Path, tmp_path: Path) -> None:
    copy, paths = damage(folder, tmp_path, [5, 6, 20])
    whole = training(settings_of(folder))
    settings = settings_of(copy, on_error="skip")
    for threads in (1, 3):
        images = training(settings, threads)
        bad = {sample for sample in range(len(images.images)) if images.images.files.where(sample) in paths}
        assert bad
        with images.stream(0) as stream:
            for step in range(images.plan.num_steps):
                for index in (0, 1):
                    samples, _ = images.samples(step, index)
                    pixels, labels = stream.next()
                    expected, expected_labels = whole.microbatch(step, index)
                    is_good = torch.tensor([int(sample) not in bad for sample in samples])
                    assert torch.equal(pixels[is_good], expected[is_good])
                    assert torch.equal(labels[is_good], expected_labels[is_good])
                    for place in torch.nonzero(~is_good).flatten().tolist():
                        stand_in = next(other for other in range(int(samples[place]), 99) if other not in bad)
                        assert labels[place] == whole.images.labels[stand_in]
                        assert labels[place] == 1 if samples[place] > 5 else labels[place] == 0
                    _, skipped = stream.take_waits()
                    assert len(skipped) == (~is_good).sum() and all("cannot be read" in line for line in skipped)


def test_evaluation_leaves_out_unreadable_images_and_reports_them(folder: Path, tmp_path: Path) -> None:
    copy, paths = damage(folder, tmp_path, [0, 13, 30])
    (tmp_path / "both").mkdir()
    copy.rename(tmp_path / "both" / "val")
    make_folder(tmp_path / "both" / "train", per_class=2)
    data = load_data_set(settings_of(tmp_path / "both", validation=0.0, on_error="skip"), threads=2)
    labels, skipped = images_of_evaluation(data)
    assert len(data.test) == 36 and labels.tolist() == [0] * 11 + [1] * 11 + [2] * 11
    assert sorted(line.split(" cannot")[0][-7:] for line in skipped) == sorted(path[-7:] for path in paths)


def test_a_set_of_only_damaged_images_ends_with_an_error(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "set", per_class=4)
    for path in folder.rglob("*.jpg"):
        path.write_bytes(b"text")
    with pytest.raises(UserError, match=r"set/ankle/\d+\.jpg cannot .*9 images in a row"):
        training(settings_of(folder, on_error="skip", validation=0.2)).microbatch(0, 0)


def test_a_decompression_bomb_is_skipped_as_unreadable(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "set", per_class=4)
    photo(3, 400, 300).save(folder / "bag" / "001.jpg")
    images = training(settings_of(folder, on_error="skip", max_pixels=50_000, validation=0.25, validation_seed=2))
    with images.stream(0) as stream:
        for _ in range(2 * images.plan.num_steps):
            stream.next()
        _, skipped = stream.take_waits()
    assert skipped and all("400 x 300 pixels are more than data.max_pixels=50000" in line for line in skipped)


def test_a_pack_gives_bitwise_the_same_batches_as_its_folder(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "packed", PackSettings())
    for settings in (settings_of(folder), settings_of(folder, crop_area=None, image_size=40)):
        packed = msgspec.structs.replace(settings, source=str(tmp_path / "packed"))
        assert same(all_of(training(packed, 2)), all_of(training(settings)))
        ours, theirs = (load_data_set(each).test for each in (packed, settings))
        assert torch.equal(ours.read(np.arange(9)), theirs.read(np.arange(9)))


def test_jpegs_precede_pixels_in_the_buffer_of_a_device_decoder() -> None:
    box = (0, 0, 8, 8)
    reads = [FileRead(7, b"abc", box), FileRead(8, np.zeros((2, 2, 3), np.uint8), None), FileRead(9, b"de", box, True)]
    assert plan_places(reads) == [(7, 0, 3, box, False), (8, 5, 17, None, False), (9, 3, 5, box, True)]


def test_a_device_decoder_must_exist_and_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    require_gpu("cpu", "cpu")
    with pytest.raises(UserError, match=r"^data\.decoder='nvjpeg' is not one of cpu; nearest"):
        load_config("smoke", ["data.decoder=nvjpeg"])
    monkeypatch.setitem(DECODERS, "nvjpeg", lambda jpegs, side, device: torch.empty(0))
    assert load_config("smoke", ["data.decoder=nvjpeg", "data.crop_padding=0"]).data.decoder == "nvjpeg"
    require_gpu("nvjpeg", "cuda")
    with pytest.raises(UserError, match=r"'nvjpeg'.*CPU; set data\.decoder=cpu$"):
        require_gpu("nvjpeg", "cpu")


@pytest.mark.parametrize("more", [{"crop_padding": 2}, {"augment": AugmentSettings(erase=0.5)}])
def test_a_device_decoder_excludes_changes_of_pixels_on_the_cpu(more: dict[str, Any]) -> None:
    with pytest.raises(
        UserError, match=rf"but data\.{next(iter(more))} changes pixels on the CPU; set data\.decoder=cpu"
    ):
        DataSettings(source="x", image_size=8, decoder="nvjpeg", **more)


@pytest.mark.parametrize(
    ("device", "batch_size", "side", "expected"),
    [
        ("cuda", 1024, 24, 4),
        ("cuda", 256, 24, 4),
        ("cuda", 64, 24, 16),  # 1,024 images
        ("cuda", 100, 24, 11),
        ("cuda", 64, 224, 16),  # 154 MB
        ("cuda", 64, 512, 5),  # 256 MiB
        ("cuda", 256, 512, 4),  # at least four batches, although they have 805 MB
        ("cpu", 64, 24, 4),
    ],
)
def test_at_least_1024_images_are_read_ahead_of_a_gpu_within_256_mib(
    folder: Path, device: str, batch_size: int, side: int, expected: int
) -> None:
    images = load_data_set(settings_of(folder, image_size=side)).train
    assert Reader(images, torch.device(device)).num_ahead(batch_size) == expected
