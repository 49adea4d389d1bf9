"""All-reduce of CPU tensors among the ranks on one node, through shared memory.

Legend: p ranks, S bytes; each rank's tensor is in shared memory and mapped by all other ranks.
Idea: a tensor is split into p slices.  After a barrier (all tensors are ready) rank i reads slice i of every tensor,
sums it and writes the sum to every tensor; after a second barrier the result is complete on all ranks.  A slice is
processed in chunks that stay in cache, so that memory is read once and written once.  For a small tensor one barrier is
cheaper: each rank writes a copy to a place that the others can read, and sums all copies itself.
Cost: 2 barriers; each rank reads S and writes S.  Small: 1 barrier; each rank reads pS and writes 2S.
The other operations read less (all_gather, broadcast) or write less (reduce_scatter, reduce).

Invariant: every element is summed in rank order, at any place in the tensor.  So the result is bitwise identical on all
ranks, and a gradient is bitwise identical in any bucket.  16-bit floats are summed in fp32 and rounded once.

A tensor's storage moves into shared memory in place, with all of its views, such as the gradients in a bucket of DDP.
"""

import contextvars
import math
import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from megabatch.comm.cpu.barrier import (
    DTYPES,
    MAILBOX,
    NO_HEADER,
    OPERATIONS,
    TIMEOUT_S,
    WORDS_PER_RANK,
    Barrier,
    BarrierHeader,
    Unmapped,
    is_supported,
    map_storage,
)
from megabatch.errors import UserError
from megabatch.planning.plan import Slice, slices
from megabatch.torch_api import share_by_descriptor

CACHE_BYTES = 1 << 20  # all ranks' parts of a chunk together: the private cache of a current core
MIN_CHUNK_BYTES = 64 << 10
TORCH_CHUNK = 32_768  # elements of 16-bit floats: for more, torch would use other threads
SMALL_BYTES = 8 << 10
SUMMED_IN_FP32 = (torch.float16, torch.bfloat16)
FOLDER = "/dev/shm"
CODES = {name: code for code, name in enumerate(OPERATIONS)}
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
DESCRIPTOR, NUM_BYTES, OFFSET, OUTCOME, IS_FINITE = (MAILBOX + word for word in range(5))


class SharedBuffer:
    """One tensor per rank, of equal size and dtype, mapped by all ranks.  Deleting it unmaps those of other ranks."""

    def __init__(
        self, number: int, tensors: Sequence[torch.Tensor], rank: int, chunk_bytes: int, places: Sequence[torch.Tensor]
    ) -> None:
        own = tensors[rank]
        self.tensors, self.rank, self.chunk_bytes, self.all_places = tensors, rank, chunk_bytes, places
        self.parts: dict[Slice, SharedBuffer] = {}
        self.words = number, own.numel(), DTYPE_CODES[own.dtype]
        chunk = TORCH_CHUNK if own.dtype in SUMMED_IN_FP32 else chunk_bytes // own.element_size()
        begin, end = slices(own.numel(), len(tensors))[rank]
        parts = [as_array(tensor) for tensor in tensors]
        self.own: Any = parts[rank]
        # The chunks of this rank's slice, each with the parts of all ranks.
        self.chunks = [[part[at : min(at + chunk, end)] for part in parts] for at in range(begin, end, chunk)]
        self.is_small = own.nbytes <= SMALL_BYTES
        self.can_be_checked = own.dtype in (torch.float32, torch.float64)
        # Places for copies of a small tensor, one per rank, and a second set for the next operation.
        self.places: list[list[Any]] = []
        if self.is_small:
            views = [as_array(place.view(own.dtype)[: own.numel()]) for place in places]
            self.places = [views[: len(tensors)], views[len(tensors) :]]

    def part(self, begin: int, end: int) -> "SharedBuffer":
        """Return the elements [begin, end) of every tensor as a buffer."""
        if (begin, end) == (0, self.words[1]):
            return self
        if (begin, end) not in self.parts:
            views = [tensor[begin:end] for tensor in self.tensors]
            self.parts[begin, end] = SharedBuffer(self.words[0], views, self.rank, self.chunk_bytes, self.all_places)
        return self.parts[begin, end]

    def close(self) -> None:
        self.own, self.chunks, self.places, self.tensors, self.parts = None, [], [], [], {}


def as_array(tensor: torch.Tensor) -> Any:
    """Use NumPy, whose calls cost a third of torch's.  It has no bfloat16, and its float16 is slow."""
    return tensor if tensor.dtype in SUMMED_IN_FP32 else tensor.numpy()


def product_of_halves(part: Any) -> float:
    """Return inf or NaN if an element is inf or NaN, because both survive products and sums, or if a product overflows.

    While the part is in the cache, this costs a third of adding two parts.
    """
    half = len(part) // 2
    odd = float(part[-1]) if len(part) % 2 else 0.0
    return float(np.dot(part[:half], part[half : 2 * half])) + odd


class SharedMemory:
    """Shared memory of this rank and the others on its node.  Operations are collective; use one thread at a time."""

    def __init__(
        self,
        store: "dist.Store",  # type: ignore[name-defined]  # only of these ranks: use a PrefixStore per node
        rank: int,
        num_ranks: int,
        timeout_s: float = TIMEOUT_S,
        names: Sequence[int] | None = None,  # the numbers of the ranks in messages
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        small_words = 2 * num_ranks * SMALL_BYTES // 8
        self.barrier = Barrier(store, rank, num_ranks, timeout_s, names or range(num_ranks), small_words)
        small = self.barrier.segment[WORDS_PER_RANK * num_ranks :].view(torch.uint8)
        self.places = small.split(SMALL_BYTES)
        self.num_buffers = 0
        self.chunk_bytes = max(MIN_CHUNK_BYTES, CACHE_BYTES // num_ranks)
        self.total, self.addend = torch.empty(2, TORCH_CHUNK)  # for sums of 16-bit floats
        self.everyone = range(num_ranks)
        self.is_finite = False  # the result of the last operation is known to be finite
        # The loss scaler detects overflows, so NumPy must not warn.  Each np.errstate would cost 1 us.
        self.quietly = contextvars.copy_context().run
        self.quietly(np.seterr, all="ignore")

    @staticmethod
    def is_supported() -> bool:
        """Return False on machines whose memory order the barrier does not support; use Gloo there."""
        return is_supported()

    @staticmethod
    def free_bytes() -> int:
        """Return the free bytes for tensors of all ranks on this node.  Containers often have 64 MB."""
        volume = os.statvfs(FOLDER)
        return volume.f_bavail * volume.f_frsize

    @property
    def waited_s(self) -> float:
        """Total time that this rank waited for others to arrive.  The straggler waits least."""
        return self.barrier.waited_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Notify the ranks that still wait for this one.  Tensors keep their values, and buffers close themselves."""
        self.places = ()
        self.barrier.close()

    def share(self, tensor: torch.Tensor, header: BarrierHeader = NO_HEADER) -> SharedBuffer:
        """Move the tensor's storage into shared memory, unless it is there, and map the storages of all other ranks."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.dtype not in DTYPE_CODES:
            raise UserError(
                f"a tensor of {tensor.dtype} on {tensor.device} with strides {tensor.stride()} cannot be shared; "
                "it must be contiguous, on the CPU, of real numbers"
            )
        flat = tensor.detach().view(-1)
        barrier, words = self.barrier, self.barrier.words
        barrier.require_open()
        own = WORDS_PER_RANK * self.rank
        self.num_buffers += 1
        problem = ""
        descriptor, num_bytes = 0, 0
        try:
            if len(flat):
                # The descriptor belongs to the storage, which closes it.
                descriptor, num_bytes = share_by_descriptor(flat.untyped_storage())
        except RuntimeError as caught:
            descriptor, problem = -1, str(caught).partition("\n")[0]
            # torch does not delete its file if /dev/shm is too small for it.
            for name in re.findall(r"file </(torch_\w+)>", problem):
                Path(FOLDER, name).unlink(missing_ok=True)
        offset = int(flat.storage_offset()) * flat.element_size()
        words[own + DESCRIPTOR], words[own + NUM_BYTES], words[own + OFFSET] = descriptor, num_bytes, offset
        buffer_words = self.num_buffers, len(flat), DTYPE_CODES[flat.dtype]
        barrier.arrive((CODES["share"], 0, *buffer_words, 0, header.step, header.bucket, header.layout))
        tensors = []
        try:
            for rank in self.everyone:
                at = WORDS_PER_RANK * rank
                if rank == self.rank or len(flat) == 0:
                    tensors.append(flat)
                elif words[at + DESCRIPTOR] >= 0:
                    storage = map_storage(barrier.pids[rank], words[at + DESCRIPTOR], words[at + NUM_BYTES])
                    mapped = torch.empty(0, dtype=flat.dtype)
                    tensors.append(mapped.set_(storage, words[at + OFFSET] // flat.element_size(), (len(flat),), (1,)))
        except RuntimeError as caught:
            problem = str(caught).partition("\n")[0]
        words[own + OUTCOME] = -self.num_buffers if problem else self.num_buffers
        barrier.wait()  # after this, a rank may free its tensor
        failed = [rank for rank in self.everyone if words[WORDS_PER_RANK * rank + OUTCOME] != self.num_buffers]
        if failed:
            cause = f" ({problem})" if problem else ""
            raise Unmapped(
                f"{barrier.name(failed)} cannot share bucket {header.bucket} of {flat.nbytes:,} bytes{cause}; "
                f"{FOLDER} has {self.free_bytes():,} left: enlarge it (docker: --shm-size), "
                "or use algorithm='flat'"
            )
        return SharedBuffer(self.num_buffers, tensors, self.rank, self.chunk_bytes, self.places)

    def all_reduce(
        self, buffer: SharedBuffer, header: BarrierHeader = NO_HEADER, scale: float | None = None, checks: bool = False
    ) -> None:
        """Replace every rank's tensor with the sum of all, times `scale`.  `checks`: set `is_finite`."""
        if not buffer.is_small:
            self.reduce_slice("all_reduce", 0, buffer, header, scale, self.everyone, checks)
            return
        places = buffer.places[self.barrier.num_operations & 1]
        places[self.rank][:] = buffer.own
        self.arrive("all_reduce", 0, buffer, header, scale)
        self.quietly(self.add, places, buffer.own, scale)
        self.is_finite = checks and buffer.can_be_checked and math.isfinite(product_of_halves(buffer.own))

    def reduce_scatter(
        self, buffer: SharedBuffer, header: BarrierHeader = NO_HEADER, scale: float | None = None
    ) -> None:
        """Replace slice i of rank i's tensor with the sum.  The rest of the tensor is undefined."""
        self.reduce_slice("reduce_scatter", 0, buffer, header, scale, [self.rank])

    def reduce(
        self, buffer: SharedBuffer, root: int, header: BarrierHeader = NO_HEADER, scale: float | None = None
    ) -> None:
        """Replace the root's tensor with the sum.  The tensors of other ranks are undefined."""
        self.reduce_slice("reduce", root, buffer, header, scale, [root])

    def all_gather(self, buffer: SharedBuffer, header: BarrierHeader = NO_HEADER, checks: bool = False) -> None:
        """Replace slice i of every tensor with that of rank i."""
        self.copy_slice("all_gather", 0, buffer, header, self.rank, checks)

    def broadcast(
        self, buffer: SharedBuffer, root: int, header: BarrierHeader = NO_HEADER, checks: bool = False
    ) -> None:
        """Replace every rank's tensor with the root's."""
        self.copy_slice("broadcast", root, buffer, header, root, checks)

    def arrive(
        self, operation: str, root: int, buffer: SharedBuffer, header: BarrierHeader, scale: float | None
    ) -> None:
        scale_bits = 0 if scale is None else struct.unpack("q", struct.pack("d", scale))[0]
        self.barrier.arrive(
            (CODES[operation], root, *buffer.words, scale_bits, header.step, header.bucket, header.layout)
        )

    def reduce_slice(
        self,
        operation: str,
        root: int,
        buffer: SharedBuffer,
        header: BarrierHeader,
        scale: float | None,
        destinations: Sequence[int],
        checks: bool = False,
    ) -> None:
        """Sum this rank's slice of all tensors into those of the destinations."""
        self.arrive(operation, root, buffer, header, scale)
        # The first addition may overwrite either operand.  A sum for another rank is computed in rank 0's tensor.
        home = destinations[0] if destinations[0] < 2 else 0
        checks, products = checks and buffer.can_be_checked, 0.0
        for parts in buffer.chunks:
            self.quietly(self.add, parts, parts[home], scale)
            products += product_of_halves(parts[home]) if checks else 0.0
            for rank in destinations:
                if rank != home:
                    parts[rank][:] = parts[home]
        self.end(checks, products)

    def copy_slice(
        self, operation: str, root: int, buffer: SharedBuffer, header: BarrierHeader, source: int, checks: bool
    ) -> None:
        """Copy this rank's slice of the source's tensor to all other tensors."""
        self.arrive(operation, root, buffer, header, None)
        checks, products = checks and buffer.can_be_checked, 0.0
        for parts in buffer.chunks:
            products += product_of_halves(parts[source]) if checks else 0.0
            for rank in self.everyone:
                if rank != source:
                    parts[rank][:] = parts[source]
        self.end(checks, products)

    def end(self, checks: bool, products: float) -> None:
        """Wait at the second barrier of an operation, after which all ranks know whether every slice is finite."""
        words = self.barrier.words
        words[WORDS_PER_RANK * self.rank + IS_FINITE] = checks and math.isfinite(products)
        self.barrier.wait()
        self.is_finite = all(words[WORDS_PER_RANK * rank + IS_FINITE] for rank in self.everyone)

    def add(self, parts: Sequence[Any], out: Any, scale: float | None) -> None:
        """Compute out = (part 0 + part 1 + part 2 + ...) * scale.  `out` may be part 0 or part 1."""
        if isinstance(out, torch.Tensor):
            total, addend = self.total[: len(out)], self.addend[: len(out)]
            total.copy_(parts[0])
            for part in parts[1:]:
                total.add_(addend.copy_(part))
            if scale is not None:
                total.mul_(scale)
            out.copy_(total)
            return
        if len(parts) == 1:
            out[:] = parts[0]
        else:
            np.add(parts[0], parts[1], out)
            for part in parts[2:]:
                np.add(out, part, out)
        if scale is not None:
            np.multiply(out, scale, out)
