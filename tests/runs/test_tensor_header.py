"""Headers that pass our check are accepted by safetensors; invalid headers are rejected without allocating memory."""

import io
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from megabatch.io.tensor_header import NotTensors, parse_header, read_header

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(7), "none": torch.empty(0, 3), "b": torch.ones(5)}


def parse(content: bytes) -> Any:
    return parse_header(io.BytesIO(content), len(content))


def with_header(header: Any, data: bytes = bytes(16)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def one(**other: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | other}


def test_header_matches_the_safetensors_library() -> None:
    content = save(TENSORS, {"key": "value"})
    header = parse(content)
    assert header.metadata == {"key": "value"}
    assert {name: entry.shape for name, entry in header.tensors.items()} == {
        name: list(tensor.shape) for name, tensor in load(content).items()
    }


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "header of 0 bytes"),
        (b"abc", "file of 3 bytes"),
        (b"\xff" * 8 + b"{}", "18,446,744,073,709,551,615 bytes"),
        (with_header(b"[" * 100_000), "nested too deeply"),
        (with_header(b"[]"), "not a JSON object"),
        (with_header(b'{"\xff": 1}'), "damaged"),
        (with_header({"a": 5}), "damaged"),
        (with_header({"__metadata__": {"a": 5}}), "damaged"),
        (with_header(one(dtype="F31")), "unknown dtype F31"),
        (with_header(one(dtype=["F32"])), "damaged"),
        (with_header(one(shape=[-2, -2])), "damaged"),
        (with_header(one(shape=[2**62, 2**62])), "damaged"),
        (with_header(one(shape=[2, 1.5])), "damaged"),
        (with_header(one(shape=[1] * 100)), "damaged"),
        (with_header(one(shape=[0, 2**63], data_offsets=[0, 0])), "damaged"),
        (with_header(one(shape=[2, 3])), "fit bytes 0 to 16"),
        (with_header(one(data_offsets=[16, 0])), "fit bytes 16 to 0"),
        (with_header(one(data_offsets=[8, 24]), bytes(24)), "fit bytes 8 to 24"),
        (with_header(one(), bytes(20)), "16 bytes, but the file has 20"),
        (with_header(one() | {"b": one()["a"]}), "fit bytes 0 to 16"),
        (
            with_header(b'{"a":' + b'{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":' * 2 + b"1}"),
            "a name occurs twice",
        ),
        (with_header(one(extra=1)), "damaged"),
    ],
)
def test_invalid_header_is_rejected_with_a_reason(content: bytes, why: str) -> None:
    with pytest.raises(NotTensors, match=why):
        parse(content)


def test_damaged_file_is_accepted_only_if_the_library_reads_the_same() -> None:
    draw, content = random.Random(1), save(TENSORS)
    accepted = 0
    for _ in range(2_000):
        damaged = bytearray(content)
        for _ in range(draw.choice([1, 2, 5])):
            damaged[draw.randrange(len(damaged))] = (
                draw.choice(b'0123456789[]{}",: abF') if draw.random() < 0.9 else 255
            )
        try:
            header = parse(bytes(damaged))
        except NotTensors:
            continue
        accepted += 1
        assert {name: entry.shape for name, entry in header.tensors.items()} == {
            name: list(tensor.shape) for name, tensor in load(bytes(damaged)).items()
        }
    assert accepted > 100


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            read_header(path)
