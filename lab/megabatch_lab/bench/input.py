"""megabatch bench input: from JPEG files to batches of uint8 images, compared with its peers, in images per second.

Every arm takes random resized crops (8% to 100% of the area, ratio 3/4 to 4/3) of all images, resizes them to S x S
with an antialiased bilinear filter and mirrors half of them.  All arms have the same cores and a warm page cache.  Arms
take turns, with a rotated order every round.  Workers and threads live through all rounds, so that a round is one epoch
without start-up.  A speed is the median over rounds.  A ratio is the median of ratios within a round, because the
machine's speed varies over time.  Peers with options (workers, threads or processes) use the fastest of a trial.

ours_folder        the files, read by the loader of `megabatch train`
ours_processes     the files, read by one single-threaded process per core: the difference is the cost of the GIL
ours_packed        the shards that `megabatch pack --shorter-side 256` writes
dataloader_pillow  torch's DataLoader with persistent workers; Pillow decodes, also with libjpeg-turbo, at 1/2, 1/4 or
                   1/8 of the size if the crop allows it, and resizes only the crop
torchvision_v2     the same files and DataLoader, with torchvision.transforms.v2 on tensors or on Pillow images; Pillow
                   decodes, because no build with torchvision's decoder can be imported together with CPU-only torch
webdataset         the shards of ours_packed, read by webdataset and a DataLoader, with the crops of dataloader_pillow
raw_decode         simplejpeg.decode_jpeg of files in memory, without crops: only the decoder

Then it prints the cost of each augmentation of these crops (see `augmentation`), such as `mixup_us`.

Sets of images: as_is, the files of the folder; full_size, the same photos scaled to a longer side of 500 and
re-encoded (4:2:0) at the quality that gives files of 100 KB, the mean of ImageNet.
"""

import importlib
import io
import math
import multiprocessing
import random
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import simplejpeg  # type: ignore[import-untyped]  # has no types
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from megabatch.data.catalog import read_encoded
from megabatch.data.pack.identity import PackSettings
from megabatch.data.pack.write import pack as make_pack
from megabatch.data.pipeline.augment import Augmentation
from megabatch.data.pipeline.encoded import EncodedImages
from megabatch.data.pipeline.order import epoch_order
from megabatch.data.pipeline.orientation import Box
from megabatch.data.pipeline.reader import BatchRequest, Reader
from megabatch.data.settings import DataSettings
from megabatch.errors import UserError
from megabatch.ranks.machine import usable_cores
from megabatch.torch_api import allow_torchvision_without_extension
from megabatch_lab.bench.augmentation import costs_us
from megabatch_lab.bench.report import in_turns, report

SETS = ("as_is", "full_size")
ARMS = ("ours_folder", "ours_packed", "dataloader_pillow", "torchvision_v2", "webdataset", "raw_decode")
FULL_SIDE, FULL_BYTES = 500, 100_000
SHORTER_SIDE = 256
SHARD_MB = 3  # small enough to give every worker of webdataset some shards
TRIAL_SHARDS = 8
AREAS, RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)
LOG_RATIOS = (math.log(RATIOS[0]), math.log(RATIOS[1]))
TRIAL_BATCHES = 10  # enough to keep all workers equally busy
CLEARLY_SLOWER = 1.5
CHUNK = 16

Epoch = Callable[[int], int]  # from a seed to the number of images
Opener = Callable[[], AbstractContextManager[Epoch]]
Candidates = Mapping[Any, Opener]


class Photos(NamedTuple):
    folder: Path
    paths: list[Path]
    pack: Path
    shards: list[Path]
    row: dict[str, Any]  # origin and properties

    def sample(self, most: int) -> "Photos":
        """Return an evenly spread sample for trials."""
        num_shards = max(TRIAL_SHARDS, math.ceil(most / len(self.paths) * len(self.shards)))
        return self._replace(paths=spread(self.paths, most), shards=self.shards[:num_shards])


class Settings(NamedTuple):
    image_size: int
    batch: int
    worker_counts: Sequence[int]  # to try for the DataLoaders
    cores: int


def run(
    source: Path,
    sets: Sequence[str],
    image_size: int,
    batch: int,
    num_images: int,
    rounds: int,
    worker_counts: Sequence[int] | None,
    json_file: Path | None,
) -> None:
    cores = len(usable_cores())
    originals = decodable(spread(jpegs_of(source), num_images), source, cores)
    worker_counts = worker_counts or sorted({0, 1, cores, cores * 3 // 2, cores * 2})
    settings = Settings(image_size, batch, worker_counts, cores)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)  # arms start separate threads
    rows = []
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create")  # trials have more workers than cores
            for name in sets:
                with TemporaryDirectory(prefix="megabatch-bench-") as folder:
                    photos = make_photos(name, source, originals, Path(folder), settings.cores)
                    print(f"{name}: {photos.row['made_by']}", flush=True)
                    rows.append(measure(photos, settings, rounds))
    finally:
        torch.set_num_threads(threads_before)
    report(rows, json_file)
    if any(row[arm] is None for row in rows for arm in ARMS):
        print("some peers are not installed and were left out; `make .venv/installed-dev` installs them")


def measure(photos: Photos, settings: Settings, rounds: int) -> dict[str, Any]:
    arms: dict[str, Opener] = {
        "ours_folder": partial(open_ours, photos.folder, settings),
        "ours_packed": partial(open_ours, photos.pack, settings),
    }
    chosen: dict[str, Any] = {}
    for name, candidates in PEERS.items():
        choice = candidates(photos, settings)
        if choice:
            chosen[name] = fastest(candidates(photos.sample(TRIAL_BATCHES * settings.batch), settings))
            arms[name] = choice[chosen[name]]
    arms["ours_processes"] = partial(open_our_processes, photos.folder, settings)
    with ExitStack() as opened:
        # Arms with processes first: forking a process with several threads is unsafe.
        epochs = {name: opened.enter_context(arms[name]()) for name in reversed(arms)}
        times = take_turns(epochs, len(photos.paths), rounds)
    return describe_reader(photos, chosen, times, rounds) | augmentation_costs(photos, settings)


def augmentation_costs(photos: Photos, settings: Settings) -> dict[str, float]:
    reader = our_reader(photos.folder, settings)
    samples = np.arange(min(settings.batch, len(photos.paths)))
    images = reader.make(BatchRequest(samples, np.zeros_like(samples))).images
    return {f"{name}_us": cost for name, cost in costs_us(images).items()}


def take_turns(epochs: Mapping[str, Epoch], num_images: int, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in epochs}
    for number, (name, is_counted) in enumerate(in_turns(epochs, rounds, warm_up=1)):
        took_s, seen = time_epoch(epochs[name], seed=rounds - 1 + number // len(epochs))
        assert seen == num_images, f"{name} gave {seen} images of {num_images}"
        if is_counted:
            times[name].append(took_s)
    return times


def fastest(candidates: Candidates) -> Any:
    if len(candidates) == 1:
        return next(iter(candidates))
    with ExitStack() as opened:
        epochs = {name: opened.enter_context(opener()) for name, opener in candidates.items()}
        for epoch in epochs.values():
            epoch(0)
        best_s = {name: time_epoch(epoch, seed=1)[0] for name, epoch in epochs.items()}
        for seed in (2, 3, 4):
            for name in [name for name in best_s if best_s[name] < CLEARLY_SLOWER * min(best_s.values())]:
                best_s[name] = min(best_s[name], time_epoch(epochs[name], seed)[0])
        return min(best_s, key=best_s.__getitem__)


def time_epoch(epoch: Epoch, seed: int) -> tuple[float, int]:
    started_s = time.perf_counter()
    seen = epoch(seed)
    return time.perf_counter() - started_s, seen


def describe_reader(
    photos: Photos, chosen: dict[str, Any], times: dict[str, list[float]], rounds: int
) -> dict[str, Any]:
    num_images = len(photos.paths)

    def ratio(above: str, below: str) -> float | None:
        """Return the ratio of two speeds, or None if an arm was not measured."""
        if above not in times or below not in times:
            return None
        return statistics.median(other / one for one, other in zip(times[above], times[below], strict=True))

    return {
        **photos.row,
        "rounds": rounds,
        **{arm: num_images / statistics.median(times[arm]) if arm in times else None for arm in ARMS},
        "folder_to_dataloader": ratio("ours_folder", "dataloader_pillow"),
        "folder_to_raw": ratio("ours_folder", "raw_decode"),
        "packed_to_dataloader": ratio("ours_packed", "dataloader_pillow"),
        "threads_to_processes": ratio("ours_folder", "ours_processes"),
        "folder_to_torchvision": ratio("ours_folder", "torchvision_v2"),
        "packed_to_webdataset": ratio("ours_packed", "webdataset"),
        "dataloader_workers": chosen["dataloader_pillow"],
        "torchvision_workers": chosen.get("torchvision_v2", (None, None))[1],
        "torchvision_on": chosen.get("torchvision_v2", (None, None))[0],
        "webdataset_workers": chosen.get("webdataset"),
        "raw_decode_by": chosen["raw_decode"],
    }


# Sets of images


def jpegs_of(source: Path) -> list[Path]:
    found = sorted(path for path in source.glob("*/*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not found:
        wrong = "has no JPEGs in class folders" if source.is_dir() else "is not a folder"
        raise UserError(f"--source {source} {wrong}; give a folder with class/photo.jpg")
    return found


def decodable(paths: list[Path], source: Path, cores: int) -> list[Path]:
    """Return the photos that the bare decoder accepts: one of ImageNet's .JPEG files is a PNG."""
    with ThreadPoolExecutor(cores) as pool:
        accepted = list(pool.map(is_decodable, paths))
    refused = [path for path, is_accepted in zip(paths, accepted, strict=True) if not is_accepted]
    if len(refused) == len(paths):
        raise UserError(f"--source {source}: libjpeg-turbo can decode none of the {len(paths):,} photos; give JPEGs")
    if refused:
        print(f"left out {len(refused):,} photos that libjpeg-turbo cannot decode, first: {refused[0]}")
    return [path for path, is_accepted in zip(paths, accepted, strict=True) if is_accepted]


def is_decodable(path: Path) -> bool:
    try:
        simplejpeg.decode_jpeg(path.read_bytes())
    except ValueError:
        return False
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check its permissions or remove it") from error
    return True


def spread(paths: list[Path], most: int) -> list[Path]:
    """Return at most `most` paths, evenly spread."""
    count = min(most, len(paths))
    return [paths[number * len(paths) // count] for number in range(count)]


def make_photos(name: str, source: Path, originals: list[Path], folder: Path, cores: int) -> Photos:
    paths = [folder / "photos" / path.relative_to(source) for path in originals]
    for parent in {path.parent for path in paths}:
        parent.mkdir(parents=True)
    quality = None
    if name == "as_is":
        made_by = f"{len(paths):,} photos of {source}, as they are"
        for original, path in zip(originals, paths, strict=True):
            shutil.copyfile(original, path)
    else:
        quality = quality_for(FULL_BYTES, originals)
        made_by = (
            f"{len(paths):,} photos of {source}, scaled to a longer side of {FULL_SIDE} and re-encoded at quality "
            f"{quality}, 4:2:0, by Pillow"
        )
        with ThreadPoolExecutor(cores) as pool:
            contents = pool.map(lambda original: encoded(enlarged(original), quality), originals)
            for path, content in zip(paths, contents, strict=True):
                path.write_bytes(content)
    pack = folder / "pack"
    make_pack(folder / "photos", pack, PackSettings(shorter_side=SHORTER_SIDE, shard_mb=SHARD_MB))
    shards = sorted(pack.glob("*.tar"))
    shapes = [simplejpeg.decode_jpeg_header(path.read_bytes())[:2] for path in paths]
    row = {
        "set": name,
        "images": len(paths),
        "mean_bytes": statistics.fmean(path.stat().st_size for path in paths),
        "mean_width": statistics.fmean(width for _, width in shapes),
        "mean_height": statistics.fmean(height for height, _ in shapes),
        "packed_mean_bytes": sum(shard.stat().st_size for shard in shards) / len(paths),
        "jpeg_quality": quality,
        "made_by": made_by,
    }
    return Photos(folder / "photos", paths, pack, shards, row)


def quality_for(num_bytes: int, originals: list[Path]) -> int:
    """Return the JPEG quality at which an enlarged photo has `num_bytes` on average."""
    sample = [enlarged(path) for path in spread(originals, 64)]

    @cache
    def excess(quality: int) -> float:
        return statistics.fmean(len(encoded(image, quality)) for image in sample) - num_bytes

    low, high = 1, 100
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if excess(middle) >= 0 else (middle, high)
    return min(low, high, key=lambda quality: abs(excess(quality)))


def enlarged(path: Path) -> Image.Image:
    with Image.open(path) as image:
        scale = FULL_SIDE / max(image.size)
        width, height = (max(1, round(side * scale)) for side in image.size)
        return image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, subsampling="4:2:0")
    return file.getvalue()


# Our arms


@contextmanager
def open_ours(source: Path, settings: Settings) -> Iterator[Epoch]:
    reader = our_reader(source, settings)
    yield lambda seed: count(our_epoch(reader, settings.batch, seed), settings.image_size)


def our_reader(source: Path, settings: Settings) -> Reader:
    data = DataSettings(source="", image_size=settings.image_size, crop_area=AREAS[0], crop_ratio=RATIOS[1], flip=True)
    images = EncodedImages(read_encoded(source).train, data, settings.cores)
    return Reader(images, augmentation=partial(Augmentation, data, 1))


def our_epoch(reader: Reader, batch: int, seed: int, part: int = 0, num_parts: int = 1) -> Iterator[Tensor]:
    """Yield the batches that a rank of `megabatch train` reads in one epoch."""
    order = epoch_order(seed, 0, len(reader.images))[part::num_parts]
    parts = np.split(order, range(batch, len(order), batch))
    requests = (partial(BatchRequest, samples, np.full_like(samples, seed)) for samples in parts)
    with closing(reader.prefetch(requests, batch)) as batches:
        for made in batches:
            yield made.images


@contextmanager
def open_our_processes(source: Path, settings: Settings) -> Iterator[Epoch]:
    one_core = settings._replace(cores=1)
    with multiprocessing.get_context("fork").Pool(settings.cores, open_worker_reader, (source, one_core)) as pool:
        parts = range(settings.cores)
        yield lambda seed: sum(pool.map(partial(our_part, one_core, seed, len(parts)), parts, chunksize=1))


WORKER_READERS: list[Reader] = []  # one in each worker process


def open_worker_reader(source: Path, settings: Settings) -> None:
    WORKER_READERS.append(our_reader(source, settings))


def our_part(settings: Settings, seed: int, num_parts: int, part: int) -> int:
    return count(our_epoch(WORKER_READERS[-1], settings.batch, seed, part, num_parts), settings.image_size)


# Peers


def random_box(draws: random.Random, height: int, width: int) -> Box:
    """Draw a crop like torchvision's RandomResizedCrop: ten attempts, then the centre.  Top, left, height, width."""
    for _ in range(10):
        area = height * width * draws.uniform(*AREAS)
        ratio = math.exp(draws.uniform(*LOG_RATIOS))
        columns, rows = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < columns <= width and 0 < rows <= height:
            return draws.randint(0, height - rows), draws.randint(0, width - columns), rows, columns
    rows, columns = min(height, round(width / RATIOS[0])), min(width, round(height * RATIOS[1]))
    return (height - rows) // 2, (width - columns) // 2, rows, columns


def crop_with_pillow(file: Path | io.BytesIO, image_size: int) -> Tensor:
    """Return uint8 [S, S, 3] in Pillow's fastest way: decode large crops at reduced size, resize only the crop."""
    with Image.open(file) as image:
        top, left, rows, columns = random_box(random, image.height, image.width)  # type: ignore[arg-type]
        scale = min(rows, columns) // image_size
        if scale >= 2:
            width = image.width
            image.draft("RGB", (image.width // scale, image.height // scale))
            scale = round(width / image.width)
            top, left, rows, columns = (edge // scale for edge in (top, left, rows, columns))
        crop = image.convert("RGB").resize(
            (image_size, image_size), Image.Resampling.BILINEAR, box=(left, top, left + columns, top + rows)
        )
    if random.random() < 0.5:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(crop))


class CropsWithPillow(Dataset[Tensor]):
    def __init__(self, paths: Sequence[Path], image_size: int) -> None:
        self.paths, self.image_size = paths, image_size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> Tensor:
        return crop_with_pillow(self.paths[number], self.image_size)


class CropsWithTorchvision(Dataset[Tensor]):
    def __init__(self, paths: Sequence[Path], image_size: int, on: str) -> None:
        v2 = importlib.import_module("torchvision.transforms.v2")
        crop = [v2.RandomResizedCrop(image_size, AREAS, RATIOS, antialias=True), v2.RandomHorizontalFlip()]
        to_tensor = [v2.PILToTensor()]
        self.transform = v2.Compose(to_tensor + crop if on == "tensors" else crop + to_tensor)
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> Tensor:
        with Image.open(self.paths[number]) as image:
            transformed: Tensor = self.transform(image.convert("RGB"))
        return transformed


def dataloader_pillow(photos: Photos, settings: Settings) -> Candidates:
    dataset = CropsWithPillow(photos.paths, settings.image_size)
    return {workers: partial(open_loader, dataset, settings, workers) for workers in settings.worker_counts}


def torchvision_v2(photos: Photos, settings: Settings) -> Candidates:
    allow_torchvision_without_extension()
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return {}
    return {
        (on, workers): partial(
            open_loader, CropsWithTorchvision(photos.paths, settings.image_size, on), settings, workers
        )
        for on in ("tensors", "Pillow's images")
        for workers in settings.worker_counts
    }


def webdataset(photos: Photos, settings: Settings) -> Candidates:
    try:
        wds = importlib.import_module("webdataset")
    except ImportError:
        return {}
    dataset = (
        wds.WebDataset([str(shard) for shard in photos.shards], shardshuffle=False, empty_check=False)
        .to_tuple("jpg")
        .map_tuple(lambda content: crop_with_pillow(io.BytesIO(content), settings.image_size))
        .map(lambda sample: sample[0])
        .batched(settings.batch, collation_fn=default_collate)
    )
    return {
        workers: partial(open_loader, dataset, settings, workers, makes_batches=True)
        for workers in settings.worker_counts
    }


@contextmanager
def open_loader(
    dataset: Dataset[Tensor], settings: Settings, workers: int, makes_batches: bool = False
) -> Iterator[Epoch]:
    loader = DataLoader(
        dataset,
        batch_size=None if makes_batches else settings.batch,
        shuffle=None if makes_batches else True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    try:
        yield lambda seed: count(loader, settings.image_size)
    finally:
        if workers and loader._iterator is not None:
            # Otherwise workers run until garbage collection.  The method is private: torch has no public one.
            loader._iterator._shutdown_workers()  # type: ignore[attr-defined]


def raw_decode(photos: Photos, settings: Settings) -> Candidates:
    contents = [path.read_bytes() for path in photos.paths]
    return {
        "processes": partial(raw_processes, contents, settings.cores),
        "threads": partial(raw_threads, contents, settings.cores),
    }


@contextmanager
def raw_threads(contents: list[bytes], cores: int) -> Iterator[Epoch]:
    chunks = [contents[start : start + CHUNK] for start in range(0, len(contents), CHUNK)]
    with ThreadPoolExecutor(cores) as pool:
        yield lambda seed: sum(pool.map(decode_all, chunks))


@contextmanager
def raw_processes(contents: list[bytes], cores: int) -> Iterator[Epoch]:
    chunks = [slice(start, start + CHUNK) for start in range(0, len(contents), CHUNK)]
    # A forked process inherits the contents: only the bounds of a chunk are sent to it.
    with multiprocessing.get_context("fork").Pool(cores, INHERITED.append, (contents,)) as pool:
        yield lambda seed: sum(pool.imap_unordered(decode_inherited, chunks))


INHERITED: list[list[bytes]] = []


def decode_inherited(chunk: slice) -> int:
    return decode_all(INHERITED[-1][chunk])


def decode_all(contents: list[bytes]) -> int:
    for content in contents:
        simplejpeg.decode_jpeg(content)
    return len(contents)


def count(batches: Iterator[Tensor] | DataLoader[Tensor], image_size: int) -> int:
    seen = 0
    for images in batches:
        assert images.dtype == torch.uint8 and sorted(images.shape[1:]) == sorted((3, image_size, image_size))
        seen += len(images)
    return seen


PEERS: dict[str, Callable[[Photos, Settings], Candidates]] = {
    "dataloader_pillow": dataloader_pillow,
    "torchvision_v2": torchvision_v2,
    "webdataset": webdataset,
    "raw_decode": raw_decode,
}
