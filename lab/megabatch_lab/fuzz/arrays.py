"""Arrays as data sources: .npz archives and folders of IDX files (a type, the dimensions and the bytes)."""

import gzip
import io
import struct
import warnings
import zipfile
import zlib
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megabatch.data.catalog import load_data_set
from megabatch.data.pipeline.images import DataSet
from megabatch.data.settings import DataSettings
from megabatch.io.arrays import Arrays
from megabatch.text import is_plain
from megabatch_lab.fuzz.formats import Files, Format, by_functions
from megabatch_lab.fuzz.mutations import corrupt_array, zeros_deflated

NPZ = "set.npz"
SIDE = 8
LABELS = np.arange(12) % 3
BOMB = 4 << 30  # bytes after decompression of 4 MB
HEADERS = (
    "{'descr': '|O', 'fortran_order': False, 'shape': (12,), }",
    "{'descr': '<u8', 'fortran_order': False, 'shape': (1000000000000,), }",
    "{'descr': '|u1', 'fortran_order': False, 'shape': (-1, 8, 8), }",
    "{'descr': [('a', '<i4')], 'fortran_order': False, 'shape': (12,), }",
    "{'descr': '<U1000000000', 'fortran_order': False, 'shape': (12,), }",
    "{'descr': '|u1', 'fortran_order': 0, 'shape': (12, 8, 8)}",
    "(" * 5000,
    "{'shape': __import__('os').getcwd()}",
    "\t{'descr'",
    "{",
    "",
)


def images(count: int = len(LABELS)) -> NDArray[np.uint8]:
    return (np.arange(count * SIDE * SIDE) % 251).astype(np.uint8).reshape(count, SIDE, SIDE)


def array_specimens() -> list[Arrays]:
    parts: Arrays = {"train_images": images(), "train_labels": LABELS, "test_images": images(), "test_labels": LABELS}
    colours = np.stack([images()] * 3, axis=-1)
    return [
        parts,
        parts | {"class_names": np.array(["cat", "dog", "käfer"])},
        parts
        | {"train_images": colours, "test_images": np.asfortranarray(colours), "test_labels": LABELS.astype(">i4")},
    ]


def archive(arrays: Arrays, compressed: bool = False) -> bytes:
    """Return an archive like numpy.savez, with a fixed time, so that an input is reproducible."""
    members = {}
    for name, array in arrays.items():
        npy = io.BytesIO()
        np.lib.format.write_array(npy, array, allow_pickle=False)
        members[f"{name}.npy"] = npy.getvalue()
    return zip_of(members, zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED)


def zip_of(members: dict[str, bytes], method: int = zipfile.ZIP_STORED, also: str | None = None) -> bytes:
    """Zip the members.  `also` names an additional empty member, which may be a duplicate."""
    content = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(content, "w") as made:
        warnings.simplefilter("ignore")
        for name, member in [*members.items(), *([(also, b"")] if also else [])]:
            made.writestr(zipfile.ZipInfo(name), member, method)  # with a fixed time, in 1980
    return content.getvalue()


def archives() -> list[Files]:
    return [{NPZ: archive(arrays, compressed)} for arrays in array_specimens() for compressed in (False, True)]


def arrays_in(content: bytes) -> Arrays:
    with np.load(io.BytesIO(content), allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def corrupt_archive(content: bytes, rng: Random) -> bytes:
    """Corrupt the arrays, the header of an array, or the zip around them, with correct checksums."""
    if rng.random() < 0.5:
        arrays = arrays_in(content)
        name = rng.choice(sorted(arrays))
        if rng.random() < 0.15:
            del arrays[name]
        else:
            arrays[name] = corrupt_array(arrays[name], rng)
        return archive(arrays)
    with zipfile.ZipFile(io.BytesIO(content)) as found:
        members = {name: found.read(name) for name in found.namelist()}
    name = rng.choice(sorted(members))
    if rng.random() < 0.6:
        members[name] = corrupt_npy(members[name], rng)
    return zip_corrupted(members, rng)


def corrupt_npy(npy: bytes, rng: Random) -> bytes:
    length = int.from_bytes(npy[8:10], "little")
    header, data = npy[10 : 10 + length], npy[10 + length :]
    what = rng.randrange(4)
    if what == 0:
        header = rng.choice(HEADERS).encode()
    elif what == 1:
        text = bytearray(header)
        text[rng.randrange(len(text))] = rng.choice(b"0123456789<>|'(),:{}[] \t\n\\xOUSV")
        header = bytes(text)
    elif what == 2:
        return npy[:6] + rng.choice((b"\0\0", b"\2\0", b"\3\0", b"\xff\xff")) + npy[8:]
    else:
        return npy[:8] + struct.pack("<H", rng.choice((0, 1, 65535))) + npy[10:]
    return npy[:8] + struct.pack("<H", len(header)) + header + data


def zip_corrupted(members: dict[str, bytes], rng: Random) -> bytes:
    """Zip with an extra or duplicate member, another compression, or a wrong size."""
    what = rng.randrange(6)
    if what == 0:
        return zip_of(members, rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)))
    if what == 1:
        return zip_of(members, also=rng.choice(("../evil.npy", "/evil.npy", "class_names.npy", "x", "a\x1b[31m.npy")))
    if what == 2:  # a zip bomb
        return bomb_archive(members, rng)
    written = bytearray(zip_of(members))
    listed = written.rindex(b"PK\1\2")
    if what == 3:  # a size in the directory
        at = listed + rng.choice((20, 24))
        written[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 2**31, 2**32 - 1)))
    elif what == 4:  # flags and method
        at = listed + rng.choice((8, 10))
        written[at : at + 2] = rng.randbytes(2)
    return bytes(written)


def bomb_archive(members: dict[str, bytes], rng: Random) -> bytes:
    """Append highly compressed zeros to one member, with or without the right size in the headers."""
    bombed = rng.choice(sorted(members))
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    packed = packer.compress(members[bombed]) + packer.flush(zlib.Z_FULL_FLUSH) + zeros_deflated(BOMB)
    written = bytearray(zip_of(members | {bombed: packed}))
    claimed = struct.pack("<I", rng.choice((len(members[bombed]), 2**32 - 2)))
    local = written.index(bombed.encode() + packed) - 30
    listed = written.index(bombed.encode(), written.index(b"PK\1\2", local + len(packed))) - 46
    for header, method_at, size_at in ((local, 8, 22), (listed, 10, 24)):
        written[header + method_at : header + method_at + 2] = struct.pack("<H", zipfile.ZIP_DEFLATED)
        written[header + size_at : header + size_at + 4] = claimed
    return bytes(written)


def is_archive(content: bytes) -> bool:
    """Return True if the zip's directory and the header of its first array can be read."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as found, found.open(found.namelist()[0]) as member:
            return member.read(6) == b"\x93NUMPY"
    except Exception:  # zipfile, which is not the reader under test, may raise anything
        return False


def require_sane(data: DataSet) -> None:
    """Assert that an accepted data set is consistent."""
    for part in (data.train, data.test):
        assert len(part) == len(part.labels) > 0
        assert 0 <= int(part.labels.min()) <= int(part.labels.max()) < len(data.class_names)
        part.read(np.arange(min(2, len(part))))
    assert all(name and is_plain(name) for name in data.class_names)
    assert len(set(data.class_names)) == len(data.class_names)
    data.fingerprint()


def read_npz_source(folder: Path) -> None:
    require_sane(load_data_set(DataSettings(source=str(folder / NPZ), image_size=SIDE)))


def idx_folders() -> list[Files]:
    def idx(array: NDArray[Any]) -> bytes:
        return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()

    labels = LABELS.astype(np.uint8)
    files = {}
    for prefix in ("train", "t10k"):
        files[f"{prefix}-images-idx3-ubyte"] = idx(images())
        files[f"{prefix}-labels-idx1-ubyte"] = idx(labels)
    return [files, {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in files.items()}]


def corrupt_idx(files: Files, rng: Random) -> Files:
    name = rng.choice(sorted(files))
    is_packed = name.endswith(".gz")
    content = gzip.decompress(files[name]) if is_packed else files[name]
    what = rng.randrange(5)
    if what == 0:
        at = 4 + 4 * rng.randrange(content[3])
        sizes = (0, 1, 2**16, 2**31, 2**32 - 1, 2**32 - 12)
        content = content[:at] + struct.pack(">I", rng.choice(sizes)) + content[at + 4 :]
    elif what == 1:
        at = rng.randrange(4)
        content = content[:at] + rng.randbytes(1) + content[at + 1 :]
    elif what == 2:
        if is_packed:  # gzip continues with the next member: 4 GB of zeros
            return files | {name: files[name] + gzip.compress(bytes(1 << 20), mtime=0) * (BOMB >> 20)}
        content += bytes(100)
    elif what == 3:
        content = content[:-1] + b"\xff"
    else:
        others = {other: content for other, content in files.items() if other != name}
        return others if rng.random() < 0.5 else others | {name: b""}
    return files | {name: gzip.compress(content, 1, mtime=0) if is_packed else content}


def is_idx(files: Files) -> bool:
    return all(first_bytes(name, content)[:3] == b"\0\0\x08" for name, content in files.items())


def first_bytes(name: str, content: bytes) -> bytes:
    if not name.endswith(".gz"):
        return content[:4]
    try:
        return zlib.decompressobj(wbits=zlib.MAX_WBITS | 16).decompress(content, 4)
    except zlib.error:
        return b""


def read_idx_source(folder: Path) -> None:
    require_sane(load_data_set(DataSettings(source=str(folder), image_size=SIDE)))


ARRAYS = {
    "npz": Format(
        by_functions(archives, read_npz_source),
        lambda files, rng: {NPZ: corrupt_archive(files[NPZ], rng)},
        lambda files: is_archive(files[NPZ]),
    ),
    "idx": Format(by_functions(idx_folders, read_idx_source), corrupt_idx, is_idx),
}
