"""A stand-in for a decoder on the device (data/pipeline/device_decoder.py), which decodes on the CPU.

A decoder for GPUs replaces `decode_like_cpu`: its arguments and result are described at `Decode`.
"""

from collections.abc import Sequence

import torch

from megabatch.data.pipeline.decode import Unreadable, decode_crop, resize
from megabatch.data.pipeline.device_decoder import DECODERS, CannotDecode, Jpeg
from megabatch.data.pipeline.orientation import Box
from megabatch.data.settings import MAX_PIXELS

NAME = "stand-in"


def decode_like_cpu(jpegs: Sequence[Jpeg], side: int, device: torch.device) -> torch.Tensor:
    out = torch.empty(len(jpegs), side, side, 3, dtype=torch.uint8, pin_memory=True).permute(0, 3, 1, 2)
    for index, jpeg in enumerate(jpegs):
        assert jpeg.content.is_pinned()
        try:
            decode_into(out[index : index + 1], jpeg)
        except Unreadable as error:
            raise CannotDecode(index, str(error)) from error
    return out.to(device, non_blocking=True)


def decode_into(out: torch.Tensor, jpeg: Jpeg) -> None:
    def choose_box(height: int, width: int) -> Box:
        return jpeg.box

    colours = "BGR" if jpeg.mirrored else "RGB"
    pixels = decode_crop(jpeg.content.numpy().tobytes(), choose_box, out.shape[-1], MAX_PIXELS, colours)
    resize(pixels, out, jpeg.mirrored)


def register() -> None:
    DECODERS[NAME] = decode_like_cpu
