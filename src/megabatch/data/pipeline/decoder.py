"""The process that decodes images for a rank: see `decoder_process`.

It decodes with the rank's own `Reader`, so the pixels, the errors and the time limits are those of threads in the rank.
Each stream has a thread, which takes requests from its socket and sends the batches.
"""

import math
import os
import threading
import traceback
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import torch

from megabatch.data.pipeline.decoder_process import (
    Buffer,
    Connection,
    Decoded,
    StreamStart,
    can_be_sent,
    map_buffer,
    receive,
    receive_descriptor,
    send,
    send_descriptor,
)
from megabatch.data.pipeline.encoded import EncodedImages
from megabatch.data.pipeline.reader import MakeRequest, Reader
from megabatch.errors import UserError


class SharedReader(Reader):
    """A reader whose buffers are shared memory."""

    def __init__(self, images: EncodedImages, start: StreamStart) -> None:
        super().__init__(images, augmentation=start.augmentation)
        self.side, self.on_device = images.side, start.on_device
        self.buffers: list[Buffer] = []
        self.keys: dict[int, int] = {}  # the index of each buffer, by address
        self.unsent: dict[int, int] = {}  # the file descriptors that the rank does not have yet

    def new_buffer(self, count: int) -> Buffer:
        shape = (count, self.side, self.side, 3)
        descriptor = os.memfd_create("megabatch-images")
        os.ftruncate(descriptor, math.prod(shape))
        buffer = map_buffer(os.dup(descriptor), shape)
        with self.lock:
            self.keys[buffer.data_ptr()] = key = len(self.buffers)
            self.buffers.append(buffer)
            self.unsent[key] = descriptor
        return buffer

    def serve(self, connection: Connection, num_ahead: int) -> None:
        """Send the batches that the rank requests, in order.  Raise EOFError or OSError when it closes the socket."""

        def requests() -> Iterator[MakeRequest]:
            while message := receive(connection):
                request, free = message
                self.free.extend(self.buffers[key] for key in free)
                yield request

        with closing(self.in_order(requests(), num_ahead)) as batches:
            for batch in batches:
                assert batch.memory is not None
                key = self.keys[batch.memory.data_ptr()]
                descriptor = self.unsent.pop(key, None)
                count, channels, height, width = batch.memory.shape
                shape = None if descriptor is None else (count, height, width, channels)
                side = batch.images.shape[3]
                labels = batch.labels.numpy()
                send(connection, Decoded(key, shape, side, labels, batch.spent, batch.skipped, batch.places))
                batch.memory = None  # until the rank frees it
                if descriptor is not None:
                    send_descriptor(connection, descriptor)
                    os.close(descriptor)


def serve(connection: Connection, start: StreamStart, images: EncodedImages) -> None:
    with suppress(EOFError, OSError), connection:
        try:
            SharedReader(images, start).serve(connection, start.num_ahead)
        except (EOFError, ConnectionError):
            return
        except Exception as error:
            send(connection, portable(error))


def portable(error: Exception) -> Exception:
    """Return the error so that it can be sent, with its traceback unless it is for the user."""
    trace = traceback.format_exc()
    if not isinstance(error, UserError):
        error.add_note(trace)
    return error if can_be_sent(error) else RuntimeError(trace)


def main(descriptor: int) -> None:
    """Serve streams until the rank closes the control socket, or ends."""
    torch.set_num_threads(1)
    control, sets = Connection(descriptor), dict[int, Any]()
    with suppress(EOFError, ConnectionError):
        while True:
            start: StreamStart = receive(control)
            connection = Connection(receive_descriptor(control))
            images = sets.setdefault(start.key, start.images)
            threading.Thread(target=serve, args=(connection, start, images), daemon=True).start()
    os._exit(0)  # a thread may hang in a file server
