"""The binary version of CIFAR-10: a folder of records, or a compressed tar of it."""

import gzip
from pathlib import Path
from random import Random

from megabatch.data.catalog import load_data_set
from megabatch.data.settings import DataSettings
from megabatch_lab.fuzz.archives import tar_of
from megabatch_lab.fuzz.arrays import BOMB, first_bytes, require_sane
from megabatch_lab.fuzz.formats import Files, Format, by_functions

SIDE = 32
ARCHIVE = "cifar-10-binary.tar.gz"
RECORD = 1 + 3 * SIDE**2


def cifar_files() -> Files:
    batches = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    records = {name: bytes([at % 3]) + bytes([at]) * (RECORD - 1) for at, name in enumerate(batches)}
    return {**records, "batches.meta.txt": b"cat\ndog\nfrog\n\n"}


def archived(files: Files) -> bytes:
    return tar_of([(f"cifar-10-batches-bin/{name}", content) for name, content in files.items()])


def packed(content: bytes) -> Files:
    return {ARCHIVE: gzip.compress(content, 1, mtime=0)}


def cifar_sources() -> list[Files]:
    return [cifar_files(), packed(archived(cifar_files()))]


def corrupt_cifar(files: Files, rng: Random) -> Files:
    changed = cifar_files()
    name = rng.choice(sorted(changed))
    what = rng.randrange(6)
    if what == 0:
        del changed[name]
    elif what == 1:
        changed[name] = changed[name][: rng.randrange(len(changed[name]))]
    elif what == 2:
        changed[name] = rng.randbytes(1) + changed[name][1:]  # a label, or a name
    elif what == 3:
        changed["batches.meta.txt"] = rng.choice((b"", b"cat", b"cat\ncat\ndog", b"\0\n\1\n\2", b"a\n" * 2_000_000))
    elif ARCHIVE in files and what == 4:  # 4 GB of zeros
        return {ARCHIVE: gzip.compress(bytes(1 << 20), mtime=0) * (BOMB >> 20)}
    elif ARCHIVE in files:
        tar = bytearray(archived(changed))
        at = rng.randrange(0, len(tar), 512) + rng.choice((0, 124, 148, 156, 257))
        return packed(bytes(tar[:at]) + rng.choice((b"\xff", b"0", b"L", b"x")) + bytes(tar[at + 1 :]))
    return packed(archived(changed)) if ARCHIVE in files else changed


def is_cifar(files: Files) -> bool:
    if ARCHIVE not in files:
        return "batches.meta.txt" in files
    return first_bytes(ARCHIVE, files[ARCHIVE]) != b""


def read_cifar_source(folder: Path) -> None:
    source = folder / ARCHIVE if (folder / ARCHIVE).exists() else folder
    require_sane(load_data_set(DataSettings(source=str(source), image_size=SIDE)))


CIFAR = {"cifar": Format(by_functions(cifar_sources, read_cifar_source), corrupt_cifar, is_cifar)}
