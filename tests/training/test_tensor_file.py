"""Safetensors files are identical to the library's, and their checksum is that of the file."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from megabatch.io.disk import fill_hashed
from megabatch.training.checkpoint.format import DTYPES, read_flat, tensors_in, write_tensors


def tensors() -> dict[str, torch.Tensor]:
    """Return tensors of every dtype and every memory layout."""
    torch.manual_seed(1)
    of_each_dtype = {f"of {name}, ü": torch.randn(5, 3).to(dtype) for name, dtype in DTYPES.items()}
    tied = torch.randn(3, 4)
    odd = {"tied": tied, "tied too": tied, "transposed": tied.T, "number": torch.tensor(7), "none": torch.empty(0, 3)}
    return of_each_dtype | odd | {"images": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)}


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    as_bytes = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*as_bytes)


@pytest.mark.parametrize("metadata", [None, {"key": 'a "word" of ü'}])
def test_the_file_is_byte_identical_to_that_of_safetensors(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    path = tmp_path / "file"
    checksum = write_tensors(path, tensors(), metadata)
    apart = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors().items()}
    assert path.read_bytes() == save(apart, metadata)
    assert checksum == hashlib.sha256(path.read_bytes()).hexdigest()


def test_both_readers_return_the_tensors_that_were_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    written = write_tensors(path, tensors())
    flat, read = read_flat(path)
    assert written == read
    for found in (tensors_in(flat), load_file(path)):
        assert found.keys() == tensors().keys()
        assert all(same_bytes(found[name], tensor) for name, tensor in tensors().items())


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    with (tmp_path / "file").open("rb") as file, pytest.raises(OSError, match="it ends after 5 of 6 bytes"):
        fill_hashed(file, memoryview(bytearray(6)))
