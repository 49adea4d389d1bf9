"""The rank's side of a separate process that decodes images (see `decoder`, which runs there).

Threads that decode in the rank's own process hold the GIL for 0.1 ms per image.  On a GPU a step consists of a
thousand short calls of torch, and the thread that launches kernels would wait for the GIL at many of them.

Each stream of batches has a socket.  The rank sends requests, and the process sends the batches in the same order: the
pixels are in shared memory, everything else is in the message.  The process allocates this memory, sends its file
descriptor with the first batch in it, and reuses it when a request lists it as free.  The memory has no name, so
nothing is left if a process is killed; and each process ends when the socket to the other one is closed.
"""

import json
import mmap
import multiprocessing.connection
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from megabatch.data.pipeline.device_decoder import Place
from megabatch.ranks.failures import describe_exit
from megabatch.runs.records import TimeBreakdown
from megabatch.torch_api import pin_in_place, unpin

MODULE = "megabatch.data.pipeline.decoder"
PROGRAM = f"import json, sys; sys.path[:] = json.loads(sys.argv[2]); from {MODULE} import main; main(int(sys.argv[1]))"
QUEUED = 2  # requests that wait in the socket, so that the process never waits for the next one
ONE_BYTE = b"."  # a file descriptor must be sent with data
LEAVE_S = 5.0
Connection = multiprocessing.connection.Connection
Buffer = torch.Tensor  # uint8 [N, C, H, W], channels last


class StreamStart(NamedTuple):
    """The first message of a stream, sent on the control socket together with the stream's own socket."""

    key: int  # of the image set
    images: Any  # None if this image set was sent before
    augmentation: Any
    num_ahead: int  # batches that are decoded at a time
    on_device: bool  # the rank's device decodes, so files are sent


class Decoded(NamedTuple):
    """A batch, at the beginning of a buffer (see `at_side`)."""

    buffer: int
    shape: tuple[int, int, int, int] | None  # of a new buffer, [N, H, W, C], whose file descriptor follows
    side: int  # of the images
    labels: NDArray[np.int64]
    spent: TimeBreakdown
    skipped: list[str]
    places: list[Place] | None  # of files in the buffer, for a decoder on the device


Result = tuple[Decoded, Buffer]


class DecoderProcess:
    """A process that decodes images for this rank.  It starts on first use and serves any number of streams."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.keys: dict[int, tuple[int, Any]] = {}  # of each image set by id, with the set, which keeps the id

    def start(self) -> None:
        if self.process:
            return
        ours, theirs = socket.socketpair()
        # Signals to the whole process group are for the rank, which saves and closes the socket.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno()), json.dumps(sys.path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            theirs.close()
        self.control = Connection(ours.detach())

    def stream(
        self, images: Any, augmentation: Any, num_ahead: int, pins: bool, on_device: bool = False
    ) -> "DecodedStream":
        """Open a stream of batches of an image set."""
        self.start()
        known = id(images) in self.keys
        key, _ = self.keys.setdefault(id(images), (len(self.keys), images))
        ours, theirs = socket.socketpair()
        with theirs, self.reporting():
            send(self.control, StreamStart(key, None if known else images, augmentation, num_ahead, on_device))
            send_descriptor(self.control, theirs.fileno())
        return DecodedStream(self, Connection(ours.detach()), num_ahead + QUEUED, pins)

    def reporting(self) -> "Reporting":
        return Reporting(self)

    def close(self) -> None:
        """End the process.  It leaves by itself, so it is killed only if it does not."""
        if not self.process:
            return
        self.control.close()
        try:
            self.process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process, self.keys = None, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Reporting:
    """A context in which the end of the process is reported, instead of the broken connection."""

    def __init__(self, decoder: DecoderProcess) -> None:
        self.decoder = decoder

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, EOFError | ConnectionError):
            process = self.decoder.process
            assert process
            with suppress(subprocess.TimeoutExpired):
                process.wait(LEAVE_S)
            how = "closed its connection" if process.returncode is None else describe_exit(process.returncode)
            raise RuntimeError(f"the process that decodes this rank's images {how}") from error


class DecodedStream:
    """Batches in the order of the requests.  Close it to end its threads and to release its memory."""

    def __init__(self, decoder: DecoderProcess, connection: Connection, num_requested: int, pins: bool) -> None:
        self.decoder, self.connection, self.num_requested, self.pins = decoder, connection, num_requested, pins
        self.buffers: dict[int, Buffer] = {}
        self.pinned: list[Buffer] = []

    def batches(self, requests: Iterator[Any], take_free: Callable[[], list[Buffer]]) -> Iterator[Result]:
        """Yield the batches and the buffers they are in.  `take_free` returns the buffers that may be overwritten."""
        num_waiting, request = 0, next(requests, None)
        with self.decoder.reporting():
            while True:
                while num_waiting < self.num_requested and request is not None:
                    send(self.connection, (request, self.keys_of(take_free())))
                    num_waiting, request = num_waiting + 1, next(requests, None)
                    if request is None:
                        send(self.connection, None)
                if not num_waiting:
                    return
                yield self.receive()
                num_waiting -= 1

    def keys_of(self, buffers: Iterable[Buffer]) -> list[int]:
        places = {buffer.data_ptr(): key for key, buffer in self.buffers.items()}
        return [places[buffer.data_ptr()] for buffer in buffers]

    def receive(self) -> Result:
        found = receive(self.connection)
        if isinstance(found, BaseException):
            raise found
        assert isinstance(found, Decoded)
        if found.shape:
            buffer = self.buffers[found.buffer] = map_buffer(receive_descriptor(self.connection), found.shape)
            if self.pins and pin_in_place(buffer):
                self.pinned.append(buffer)
        return found, self.buffers[found.buffer]

    def close(self) -> None:
        """No copy from the buffers may be in progress."""
        self.connection.close()
        for buffer in self.pinned:
            unpin(buffer)
        self.pinned, self.buffers = [], {}


def send(connection: Connection, value: Any) -> None:
    """Send a value.  `Connection.send` would use torch's pickler, which moves tensors to shared memory."""
    connection.send_bytes(pickle.dumps(value))


def can_be_sent(value: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True


def receive(connection: Connection) -> Any:
    """Return a value that our own process sent."""
    return pickle.loads(connection.recv_bytes())


def map_buffer(descriptor: int, shape: tuple[int, int, int, int]) -> Buffer:
    """Map shared memory, and close the descriptor."""
    try:
        memory = mmap.mmap(descriptor, int(np.prod(shape)))
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8).view(shape).permute(0, 3, 1, 2)


def send_descriptor(connection: Connection, descriptor: int) -> None:
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        socket.send_fds(end, [ONE_BYTE], [descriptor])


def receive_descriptor(connection: Connection) -> int:
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        _, found, _, _ = socket.recv_fds(end, len(ONE_BYTE), 1)
    if not found:
        raise EOFError
    return found[0]
