"""Arrays from untrusted files: files that numpy writes are read as numpy reads them, and all others are refused."""

import io
import os
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megabatch.io.arrays import NotArrays, read_array, read_arrays

KINDS = {
    "small": np.arange(12, dtype=np.uint8).reshape(3, 4),
    "fortran": np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
    "big_endian": np.arange(5, dtype=">i4"),
    "unsigned": np.array([2**63, 2**64 - 1], ">u8"),
    "texts": np.array(["cat", "Käse", "\U0001f600"]),
    "big_endian_texts": np.array(["cat", "\U0001f600"]).astype(">U3"),
    "number": np.array(5),
    "text": np.array("x"),
    "none": np.zeros((0, 3)),
    "no_texts": np.array([], np.str_),
    "truth": np.array([True, False]),
    "bytes": np.array([b"ab"]),
}


def npy(header: str, content: bytes = b"", version: int = 1) -> bytes:
    length = struct.pack("<H" if version == 1 else "<I", len(header.encode()))
    return b"\x93NUMPY" + bytes([version, 0]) + length + header.encode() + content


def zipped(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def header(descr: str = "'<i8'", order: str = "False", shape: str = "(2,)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_files_written_by_numpy_are_read_as_numpy_reads_them(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "a.npz", **KINDS)
    read = read_arrays(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as expected:
        assert set(read) == set(expected.files)
        for name, array in read.items():
            assert (array.dtype, array.shape) == (expected[name].dtype, expected[name].shape)
            assert array.tobytes("A") == expected[name].tobytes("A")
            assert array.flags.f_contiguous == expected[name].flags.f_contiguous
    assert set(read_arrays(tmp_path / "a.npz", wanted=("text", "gone"))) == {"text"}


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_all_header_versions_are_read(version: tuple[int, int]) -> None:
    file = io.BytesIO()
    np.lib.format.write_array(file, KINDS["fortran"], version)
    file.seek(0)
    assert np.array_equal(read_array(file.read, len(file.getvalue())), KINDS["fortran"])


@pytest.mark.parametrize(
    "text",
    [
        header("'|O'"),
        header("'<M8[ns]'"),
        header("[('a', '<i8')]"),
        header("'<U0'"),
        header("'<U99999999'"),
        header("'<i3'"),
        header(shape="(2)"),
        header(shape="(-2,)"),
        header(shape="(2.0,)"),
        header(shape=f"({'9' * 18}, {'9' * 18})"),
        header(shape=f"(0, {'9' * 18}, {'9' * 18})"),
        header(shape=f"({'9' * 5000},)"),
        header(shape=f"({'1, ' * 60})"),
        header(shape="(3,)"),
        header(order="1"),
        header(shape="(__import__('os').getpid(),)"),
        "{'descr': '<i8', 'descr': '<i8', 'shape': (2,), }\n",
        "{'descr': '<i8', 'fortran_order': False, }\n",
        "{" * 3000,
        " " * 20_000,
        "",
        "(",
    ],
)
def test_invalid_headers_are_refused(text: str) -> None:
    content = npy(text, bytes(16), version=2)
    with pytest.raises(NotArrays):
        read_array(io.BytesIO(content).read, len(content))


def test_invalid_characters_are_refused() -> None:
    content = npy(header("'<U1'"), struct.pack("<II", 65, 0x110000))
    with pytest.raises(NotArrays, match="invalid code points"):
        read_array(io.BytesIO(content).read, len(content))


def with_wrong_directory(**fields: int) -> bytes:
    """Return an archive whose directory has wrong fields for its only member."""
    content = bytearray(zipped({"a.npy": npy(header(), bytes(16))}))
    places = {"flags": (8, 2), "compression": (10, 2), "stored": (20, 4), "size": (24, 4), "offset": (42, 4)}
    directory = content.index(b"PK\x01\x02")
    for name, value in fields.items():
        place, length = places[name]
        content[directory + place : directory + place + length] = value.to_bytes(length, "little")
    return bytes(content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a complete .npz"),
        (b"\x93NUMPY\x01\x00v\x00", "not a complete .npz"),
        (zipped({"a.npy": b"PK"}), "not an .npy of version"),
        (zipped({"a.npy": npy(header(), bytes(15))}), "has 16 bytes; 15 are stored"),
        (zipped({"a.npy": npy(header(), bytes(17))}), "has 16 bytes; 17 are stored"),
        (zipped({"a.npy": b"", "a": b""}), "two arrays of the same name"),
        (zipped({"a.npy": b""}, zipfile.ZIP_LZMA), "compression is not one of numpy"),
        (with_wrong_directory(flags=1), "encrypted"),
        (with_wrong_directory(compression=99), "compression is not one of numpy"),
        (with_wrong_directory(size=2**32 - 2), "its two sizes differ"),
        (with_wrong_directory(compression=8, size=2**32 - 2), "would expand to"),
        (with_wrong_directory(stored=10**6, size=10**6), "overlap"),
        (with_wrong_directory(offset=10**6), "overlap"),
        (with_wrong_directory()[:-30], "not a complete .npz"),
    ],
)
def test_an_inconsistent_zip_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(NotArrays, match=message):
        read_arrays(tmp_path / "a.npz")


def test_memory_is_not_allocated_for_missing_bytes(tmp_path: Path) -> None:
    """The header announces a hundred megabytes; the file has a few bytes."""
    content = npy(header("'<u1'", shape=f"({10**8},)"), bytes(100))
    (tmp_path / "a.npz").write_bytes(zipped({"a.npy": content}, zipfile.ZIP_DEFLATED))
    tracemalloc.start()
    try:
        with pytest.raises(NotArrays):
            read_arrays(tmp_path / "a.npz")
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_a_fifo_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "a.npz").symlink_to(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a regular file"):
        read_arrays(tmp_path / "a.npz")
