"""The operations that a 16-bit all-reduce runs on an accelerator do not depend on the number of ranks."""

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megabatch.comm.accelerator.device_group import DeviceGroup, backend_timeout_s
from megabatch.planning.plan import BLOCK

CPU = torch.device("cpu")


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.by_operation: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.by_operation[str(function)] += 1
        return function(*args, **(kwargs or {}))


class Mirror:
    """A process group whose members all have the tensor of this one."""

    def __init__(self, store: Any, index: int, size: int, timeout: timedelta) -> None:
        self.calls: Counter[str] = Counter()
        self.index, self.size, self.timeout = index, size, timeout

    def called(self, operation: str) -> "Mirror":
        self.calls[operation] += 1
        return self

    def wait(self) -> None: ...

    def alltoall_base(self, out: torch.Tensor, flat: torch.Tensor, received: list[int], sent: list[int]) -> "Mirror":
        assert received == sent == [] and len(flat) == len(out)  # equal slices need no list of sizes
        out.view(self.size, -1)[:] = flat.view(self.size, -1)[self.index]
        return self.called("alltoall")

    def _allgather_base(self, out: torch.Tensor, own: torch.Tensor) -> "Mirror":
        assert len(out) == self.size * len(own)
        out.view(self.size, -1)[self.index] = own
        return self.called("allgather")

    def _reduce_scatter_base(self, own: torch.Tensor, flat: torch.Tensor) -> "Mirror":
        own.copy_(flat.view(self.size, -1)[self.index] * self.size)
        return self.called("reduce_scatter")


def group_of(num_members: int, index: int = 0) -> DeviceGroup:
    return DeviceGroup(dist.HashStore(), index, range(num_members), 600.0, CPU, Mirror)


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [
        ("all_reduce", "bf16"),
        ("reduce_scatter", "bf16"),
        ("reduce_scatter", "same"),
        ("all_gather", "bf16"),
        ("all_gather", "same"),
    ],
)
def test_operations_do_not_grow_with_the_number_of_members(operation: str, dtype: str) -> None:
    counted = []
    for num_members in (3, 64, 4096):
        group, flat = group_of(num_members), torch.ones(10_007)
        getattr(group, operation)(flat, dtype)  # the first call allocates the buffers
        group.group.calls.clear()
        with Launches() as launches:
            getattr(group, operation)(flat, dtype)
        counted.append((launches.by_operation, group.group.calls))
    assert counted[0] == counted[1] == counted[2]
    assert not any("empty" in name for name in counted[0][0])


@pytest.mark.parametrize("num_elements", [1, 5, 160, 1000])
def test_reduce_scatter_sums_the_own_slice_without_padding(num_elements: int) -> None:
    for index in range(3):
        group, flat = group_of(3, index), torch.arange(float(num_elements))
        views = group.buffers.slices(num_elements, torch.bfloat16)
        views.padded.fill_(torch.nan)
        expected = flat.clone()
        expected[views.own_range] = (3 * flat.bfloat16()[views.own_range].float()).bfloat16().float()
        group.reduce_scatter(flat, "bf16")
        assert torch.equal(flat, expected)


def test_tensors_of_one_dtype_share_the_largest_buffer() -> None:
    group = group_of(4)
    for num_elements in (100, 5000, 300, 5000, 100):
        group.all_reduce(torch.ones(num_elements), "bf16")
    storage = group.buffers.storage
    assert {purpose for purpose, _ in storage} == {"padded", "own", "received", "total"} and len(storage) == 4
    assert len(storage["padded", torch.bfloat16]) < 5000 + 4 * BLOCK
    group.free_buffers()
    assert not group.buffers.storage and not group.buffers.known_slices


@pytest.mark.parametrize("num_rows", range(2, 17))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_reduction_adds_rows_in_ascending_order(num_rows: int, dtype: torch.dtype) -> None:
    """This holds on the CPU for whole blocks, so the rehearsal of CUDA is bitwise identical to the loop of the CPU."""
    for num_blocks in (1, 3, 64, 4097):
        generator = torch.Generator().manual_seed(num_blocks)
        rows = torch.randn(num_rows, num_blocks * BLOCK, generator=generator).to(dtype)
        total = rows[0].float()
        for row in rows[1:]:
            total += row
        assert torch.equal(torch.sum(rows, dim=0, dtype=torch.float32), total)


def test_timeout_of_the_backend_exceeds_that_of_the_watchdog() -> None:
    group = group_of(2)
    assert group.group.timeout.total_seconds() == backend_timeout_s(600.0) > 600.0
