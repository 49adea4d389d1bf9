"""Verifies a pack: compares every byte of its shards with the checksums of the index."""

import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np

from megabatch.data.pack.shards import ShardFiles, Shards
from megabatch.data.sources.index import INDEX, read_index
from megabatch.errors import UserError
from megabatch.io.arrays import Arrays


def verify(folder: Path, show: Callable[[int, int], None] = lambda done, total: None) -> list[str]:
    """Return a line for each damaged part.  `show` is called with the number of images read and their total."""
    try:
        if not (folder / INDEX).exists():
            raise UserError(f"{folder} has no {INDEX} and so no checksums; give a finished megabatch pack")
        index = read_index(folder)
        if "rest_crc32" not in index:
            raise UserError(f"{folder / INDEX} has no checksums; pack again")
        shards = Shards([folder / str(name) for name in index["shards"]], index["sizes"])
        damaged: dict[int, list[str]] = {}
        done, total = 0, len(index["label"])
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            jobs = {pool.submit(verify_shard, index, shards, shard): shard for shard in range(len(shards.paths))}
            for job in as_completed(jobs):
                num_images, damaged[jobs[job]] = job.result()
                done += num_images
                show(done, total)
    except OSError as error:
        raise UserError(
            f"{error.filename or folder} cannot be read ({error.strerror or error}); check its permissions"
        ) from error
    return [line for shard in sorted(damaged) for line in damaged[shard]]


def verify_shard(index: Arrays, shards: Shards, shard: int) -> tuple[int, list[str]]:
    """Return the number of images of a shard and a line for each damaged part.

    Each image has a checksum, and all bytes between the images (names, labels, padding) have one together.  They are
    read in one pass in file order.
    """
    chosen = np.flatnonzero(index["shard"] == shard)
    chosen = chosen[np.argsort(index["offset"][chosen])]
    files = ShardFiles(shards, *(index[name][chosen] for name in ("shard", "offset", "length", "label")))
    size = int(shards.sizes[shard])
    damaged: list[str] = []
    rest_crc32, end = 0, 0
    for number, crc32 in enumerate(index["crc32"][chosen]):
        offset = int(files.offset[number])
        if offset < end:
            damaged.append(f"{files.where(number)}: the image overlaps the previous one")
            continue
        rest_crc32 = zlib.crc32(shards.read(shard, end, offset - end), rest_crc32)
        end = offset + int(files.length[number])
        if zlib.crc32(files.content(number)) != crc32:
            damaged.append(f"{files.where(number)}: the image has another checksum")
    if zlib.crc32(shards.read(shard, end, size - end), rest_crc32) != index["rest_crc32"][shard]:
        damaged.append(f"{shards.paths[shard]}: names or labels between its images have another checksum")
    return len(chosen), damaged
