"""The interface for a decoder of JPEGs on the device (`data.decoder`).

To add a decoder, write a function of the type `Decode` and add it to DECODERS.  None is built in, because we have no
GPU to measure one on.  The stand-in of lab/megabatch_lab/rehearsal/device_decoder.py tests the rest.

With such a decoder, the threads that otherwise decode only read files, parse headers and choose crops.  They still
decode images that are not baseline JPEGs, which hardware does not decode.  A batch is in one buffer of pinned memory:
first the JPEGs, then the decoded pixels.  The decoder is called while the previous batch is in use.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megabatch.data.pipeline.orientation import Box
from megabatch.errors import UserError

CPU_DECODER = "cpu"
ROOM = 1.25  # of a buffer, relative to its first batch: files differ in size


class Jpeg(NamedTuple):
    """A baseline JPEG.  Its content stays valid until the work that is enqueued on the current stream has ended."""

    content: torch.Tensor  # uint8 [bytes], in pinned memory
    box: Box  # the crop: top, left, height, width in pixels of the whole image
    mirrored: bool


# decode(jpegs, side, device) returns the crops in RGB, resized by an antialiased bilinear filter and mirrored if asked:
# uint8 [N, 3, side, side] on the device, in the memory format channels_last.  It is called by the thread that launches
# kernels, with the stream on which batches are copied.  So it must only enqueue work on this stream, and never wait.
Decode = Callable[[Sequence[Jpeg], int, torch.device], torch.Tensor]

DECODERS: dict[str, Decode] = {}


class CannotDecode(Exception):
    """Raised by a decoder for the JPEG with this index."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


class FileRead(NamedTuple):
    """An image of a batch that a thread has read."""

    sample: int
    content: bytes | NDArray[np.uint8]  # a JPEG, or pixels [side, side, 3]
    box: Box | None  # None: pixels
    mirrored: bool = False


class Place(NamedTuple):
    """An image of a batch in its buffer."""

    sample: int
    begin: int
    end: int
    box: Box | None
    mirrored: bool


def require_gpu(name: str, device_type: str) -> None:
    if name != CPU_DECODER and device_type == "cpu":
        raise UserError(f"data.decoder={name!r} decodes on a GPU, but this run uses the CPU; set data.decoder=cpu")


def plan_places(reads: Sequence[FileRead]) -> list[Place]:
    """Return the places of images in a buffer, in their order in the batch: JPEGs first in memory, then pixels."""
    places: dict[int, Place] = {}
    end = 0
    for index in sorted(range(len(reads)), key=lambda index: reads[index].box is None):
        sample, content, box, mirrored = reads[index]
        begin, end = end, end + (content.nbytes if isinstance(content, np.ndarray) else len(content))
        places[index] = Place(sample, begin, end, box, mirrored)
    return [places[index] for index in range(len(reads))]


def flat(buffer: torch.Tensor) -> torch.Tensor:
    """Return the memory of a buffer, [N, C, H, W] with channels last, as bytes."""
    return buffer.permute(0, 2, 3, 1).view(-1)


def fill(buffer: torch.Tensor, reads: Sequence[FileRead], places: Sequence[Place]) -> None:
    memory = flat(buffer).numpy()
    for read, place in zip(reads, places, strict=True):
        memory[place.begin : place.end] = np.frombuffer(read.content, np.uint8)


def decode_batch(
    decode: Decode, buffer: torch.Tensor, places: Sequence[Place], side: int, device: torch.device
) -> torch.Tensor:
    """Return the images of a batch, on the device.  The host waits for nothing."""
    memory = flat(buffer)
    of_jpegs = [index for index, place in enumerate(places) if place.box]
    of_pixels = [index for index, place in enumerate(places) if not place.box]
    jpegs = [
        Jpeg(memory[place.begin : place.end], place.box, place.mirrored) for place in places if place.box is not None
    ]
    parts = []
    if jpegs:
        decoded = decode(jpegs, side, device)
        assert decoded.shape == (len(jpegs), 3, side, side) and decoded.dtype == torch.uint8, "a fault of the decoder"
        parts.append(decoded)
    if of_pixels:
        pixels = memory[places[of_pixels[0]].begin : places[of_pixels[-1]].end].view(-1, side, side, 3)
        parts.append(pixels.to(device, non_blocking=True).permute(0, 3, 1, 2))
    if len(parts) == 1:
        return parts[0]
    order = torch.tensor(np.argsort([*of_jpegs, *of_pixels])).pin_memory().to(device, non_blocking=True)
    return torch.cat(parts).index_select(0, order).contiguous(memory_format=torch.channels_last)
