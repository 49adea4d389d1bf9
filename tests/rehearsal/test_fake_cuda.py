"""The fake CUDA behaves like a real device, as far as a host can observe."""

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from megabatch_lab.rehearsal import fake_cuda
from torch import nn

from megabatch.ranks.world import World
from tests.support.rank_pool import RankPool
from tests.support.rehearsals import on


def run(ranks: RankPool, function: Any, *args: Any) -> Any:
    return ranks.run(function, *args, num_ranks=1, join=on("cuda"))[0]


def launch(times: int) -> None:
    tensor = torch.zeros(2, device="cuda")
    for _ in range(times):
        tensor += 1


def waits() -> list[str]:
    return [seen.name for seen in fake_cuda.seen("sync")]


def read_copy(world: World, how: str) -> dict[str, Any]:
    """Return pinned memory before and after the host has waited for a copy, and the waits."""
    values, memory = torch.arange(3.0, device="cuda"), torch.zeros(3).pin_memory()
    fake_cuda.reset()
    memory.copy_(values, non_blocking=True)
    event = torch.Event("cuda")
    event.record()
    values.zero_()  # after the copy
    early, asked = memory.tolist(), event.query()
    match how:
        case "later":
            launch(fake_cuda.LAG)
            assert event.query()
        case "polled":
            while not event.query():
                pass
        case "event":
            event.synchronize()
        case "stream":
            torch.accelerator.current_stream().synchronize()
        case "device":
            torch.accelerator.synchronize()
        case "item":
            values[0].item()
        case "another stream":
            other, behind = torch.Stream("cuda"), torch.Event("cuda")
            other.wait_event(event)
            behind.record(other)
            behind.synchronize()
    return {"early": early, "asked": asked, "late": memory.tolist(), "waits": waits()}


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("later", []),
        ("polled", ["event.query, polled"]),
        ("event", ["event.synchronize"]),
        ("stream", ["stream.synchronize"]),
        ("device", ["device synchronize"]),
        ("item", ["aten::_local_scalar_dense"]),
        ("another stream", ["event.synchronize"]),
    ],
)
def test_copy_to_the_host_is_visible_once_its_event_is_complete(ranks: RankPool, how: str, expected: list[str]) -> None:
    seen = run(ranks, read_copy, how)
    assert seen == {"early": [0, 0, 0], "asked": False, "late": [0, 1, 2], "waits": expected}


def overwrite_a_source(world: World, when: str) -> int:
    fake_cuda.reset()
    memory = torch.ones(1000).pin_memory()
    copied = memory.to("cuda", non_blocking=True)
    if when == "at once":
        memory.zero_()
    elif when == "freed":
        del memory
        torch.zeros(1000).pin_memory()
    launch(fake_cuda.LAG)
    if when == "later":
        memory.zero_()
    assert copied.sum().item() == 1000
    return len(fake_cuda.seen("hazard"))


@pytest.mark.parametrize(("when", "hazards"), [("at once", 1), ("later", 0), ("freed", 0)])
def test_pinned_memory_that_changes_during_a_copy_is_a_hazard(ranks: RankPool, when: str, hazards: int) -> None:
    assert run(ranks, overwrite_a_source, when) == hazards


def use_on_two_streams(world: World, how: str) -> list[str]:
    """Return the hazards of work on two streams."""
    main, side = torch.accelerator.current_stream(), torch.Stream("cuda")
    values = torch.ones(4, device="cuda")
    fake_cuda.reset()
    if how != "reads too early":
        side.wait_stream(main)
    with side:
        doubled = values * 2
    if how == "writes too early":
        values += 1
    if how == "host waits":
        side.synchronize()
    elif how not in ("reads the result too early", "writes too early"):
        main.wait_stream(side)
    total = doubled + doubled if how != "reads too early" and how != "writes too early" else None
    if how == "registered":
        doubled.record_stream(main)
    elif how != "freed too early":
        side.wait_stream(main)
    del doubled, total
    return [seen.name for seen in fake_cuda.seen("hazard")]


@pytest.mark.parametrize(
    ("how", "hazards"),
    [
        ("waits", []),
        ("host waits", []),
        ("registered", []),
        ("reads too early", ["aten::mul: stream _ does not wait for a write of stream 0"]),
        ("reads the result too early", ["aten::add: stream 0 does not wait for a write of stream _"] * 2),
        ("writes too early", ["aten::add: stream 0 writes memory in use on stream _"]),
        ("freed too early", ["freed on stream _, in use on stream 0"]),
    ],
)
def test_missing_wait_between_streams_is_a_hazard(ranks: RankPool, how: str, hazards: list[str]) -> None:
    assert [re.sub("stream [1-9][0-9]*", "stream _", name) for name in run(ranks, use_on_two_streams, how)] == hazards


def waits_by_operation(world: World) -> dict[str, list[str]]:
    tensor, host, pinned = torch.ones(4, 4, device="cuda"), torch.ones(4, 4), torch.ones(4, 4).pin_memory()
    mask, places = tensor > 0, torch.tensor([0, 1], device="cuda")
    operations = {
        "add": lambda: tensor + 1,
        "sum": lambda: tensor.sum(),
        "fill with a number": lambda: tensor[1].fill_(3),
        "assign a number to a row": lambda: tensor.__setitem__(0, 2.0),
        "index by places": lambda: tensor[places],
        "from pinned memory": lambda: pinned.to("cuda", non_blocking=True),
        "to pinned memory": lambda: pinned.copy_(tensor, non_blocking=True),
        "other stream": lambda: torch.Stream("cuda").wait_stream(torch.accelerator.current_stream()),
        "future": lambda: finished(tensor).wait(),
        "item": lambda: tensor[0, 0].item(),
        "assign from the host": lambda: tensor.__setitem__((0, 0), host[0, 0]),
        "if": lambda: bool(tensor[0, 0] > 0),
        "tolist": lambda: tensor.tolist(),
        "index by a mask": lambda: tensor[mask],
        "nonzero": lambda: tensor.nonzero(),
        "masked_select": lambda: tensor.masked_select(mask),
        "equal": lambda: torch.equal(tensor, tensor),
        "unique": lambda: tensor.unique(),
        "blocking from pinned memory": lambda: pinned.to("cuda"),
        "from memory that is not pinned": lambda: host.to("cuda", non_blocking=True),
        "to memory that is not pinned": lambda: host.copy_(tensor, non_blocking=True),
        "another type from pinned memory": lambda: tensor.copy_(pinned.double().pin_memory(), non_blocking=True),
        "from a list": lambda: torch.tensor([1.0], device="cuda"),
    }
    found = {}
    for name, operation in operations.items():
        fake_cuda.reset()
        operation()
        found[name] = waits()
    return found


def finished(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[tensor.device])
    future.set_result(tensor)
    return future.then(lambda ready: ready.value() + 1)


def test_only_operations_that_wait_on_a_real_device_are_counted(ranks: RankPool) -> None:
    found = run(ranks, waits_by_operation)
    never = list(found)[: list(found).index("item")]
    assert {name: found[name] for name in never} == {name: [] for name in never}
    assert [name for name in found if name not in never and not found[name]] == []


def wait_on_another_thread(world: World) -> tuple[str, str]:
    fake_cuda.reset()
    thread = threading.Thread(target=lambda: torch.ones(1, device="cuda").item(), name="aside")
    thread.start()
    thread.join()
    (seen,) = fake_cuda.seen("sync")
    return seen.thread, seen.where


def test_wait_on_another_thread_is_counted(ranks: RankPool) -> None:
    thread, where = run(ranks, wait_on_another_thread)
    assert thread == "aside" and "test_fake_cuda.py:" in where


def facts(world: World) -> dict[str, Any]:
    fake_cuda.set_devices(1)
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    held = torch.ones(250, device="cuda")
    one = torch.accelerator.device_count(), torch.cuda.device_count()
    fake_cuda.set_devices(8)
    fake_cuda.host_view(held).mul_(2)
    began, ended = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    began.record()
    ended.record()
    torch.accelerator.synchronize()
    with torch.Stream("cuda") as stream, fake_cuda.traced() as traced:
        held + 1
    with torch.autocast("cuda", dtype=torch.float16):
        product = torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")
    return {
        "accelerator": str(torch.accelerator.current_accelerator()),
        "one": one,
        "eight": torch.accelerator.device_count(),
        "bytes": torch.accelerator.memory_allocated() - before,
        "peak": torch.accelerator.max_memory_allocated() >= before + 1000,
        "sum": held.sum().item(),
        "pinned": (
            torch.ones(1).pin_memory().is_pinned(),
            torch.empty(3, pin_memory=True).is_pinned(),
            held.is_pinned(),
        ),
        "plain": torch.ones(1).is_pinned(),
        "elapsed": began.elapsed_time(ended) >= 0,
        "streams": {(seen.kind, seen.stream == stream.stream_id) for seen in traced},
        "autocast": str(product.dtype),
    }


def test_torch_finds_its_devices_streams_memory_and_clock(ranks: RankPool) -> None:
    assert run(ranks, facts) == {
        "accelerator": "cuda",
        "one": (1, 1),
        "eight": 8,
        "bytes": 1000 + 8,  # with the product
        "peak": True,
        "sum": 500,
        "pinned": (True, True, False),
        "plain": False,
        "elapsed": True,
        "streams": {("launch", True), ("allocation", True)},
        "autocast": "torch.float16",
    }


# torch can decompose mul.Tensor but not relu, and the fake CUDA has a kernel for empty.
REGISTERED_BEFORE = """
import torch
from torch import nn
from megabatch_lab.rehearsal import fake_cuda


def kernel(*args, **options):
    raise AssertionError("a GPU kernel was called")


library = torch.library.Library("aten", "IMPL")
for name in ("mul.Tensor", "relu", "empty.memory_format"):
    library.impl(name, kernel, "CUDA")
fake_cuda.install()
fake_cuda.reset()
tensor = torch.empty(2, device="cuda").fill_(-2.0)
print((tensor * tensor).tolist(), tensor.relu().tolist(), fake_cuda.launches()["aten::mul"])
"""


def test_kernels_of_a_cuda_build_are_replaced(ranks: RankPool) -> None:
    """Run in another process that registers kernels before the fake CUDA is installed, like a CUDA build of torch."""
    command, root = [sys.executable, "-W", "ignore", "-c", REGISTERED_BEFORE], Path(__file__).parents[2]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert result.stdout == "[4.0, 4.0] [0.0, 0.0] 1\n", result.stderr
    assert result.stderr == ""


def refused(world: World, deterministic: bool) -> list[str]:
    """Return torch's errors of operations, some of which have no deterministic kernel on CUDA."""
    operations = {
        "adaptive max": lambda x: nn.AdaptiveMaxPool2d(1)(x).sum().backward(),
        "adaptive average to 2x2": lambda x: nn.AdaptiveAvgPool2d(2)(x).sum().backward(),
        "adaptive average to 1x1": lambda x: nn.AdaptiveAvgPool2d(1)(x).sum().backward(),
        "max": lambda x: nn.MaxPool2d(2)(x).sum().backward(),
        "cumsum": lambda x: x.cumsum(0),
        "cumsum of integers": lambda x: x.long().cumsum(0),
    }
    errors = []
    torch.use_deterministic_algorithms(deterministic)
    for name, run_on in operations.items():
        try:
            run_on(torch.ones(2, 3, 6, 6, device="cuda", requires_grad=True))
        except RuntimeError as error:
            errors.append(f"{name}: {str(error).partition(',')[0]}")
    torch.use_deterministic_algorithms(False)
    return errors


def test_operations_without_a_deterministic_kernel_are_refused_as_on_cuda(ranks: RankPool) -> None:
    assert run(ranks, refused, False) == []
    lacking = "_cuda does not have a deterministic implementation"
    assert run(ranks, refused, True) == [
        f"adaptive max: adaptive_max_pool2d_backward{lacking}",
        f"adaptive average to 2x2: adaptive_avg_pool2d_backward{lacking}",
        f"cumsum: cumsum{lacking}",
    ]


def contexts_after(world: World, how: str) -> list[int]:
    """Return the devices with a context after a thread used an event of device 5, which is current in this one."""
    torch.accelerator.set_device_index(5)
    tensor, event = torch.zeros(2, device="cuda"), torch.Event("cuda")
    tensor += 1
    event.record()
    fake_cuda.reset()
    events = [event]
    del event

    def use() -> None:
        if how == "query on its device":
            torch.accelerator.set_device_index(5)
        if how.startswith("query"):
            events[0].query()
        if how == "drop":
            events.clear()
        if how == "launch":
            tensor.add_(1)  # torch's guard returns without a call of CUDA

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    found = fake_cuda.contexts()
    torch.accelerator.set_device_index(0)
    return found


@pytest.mark.parametrize(
    ("how", "expected"), [("query", [0]), ("drop", [0, 5]), ("launch", [5]), ("query on its device", [5])]
)
def test_thread_that_sets_no_device_makes_a_context_on_device_0(ranks: RankPool, how: str, expected: list[int]) -> None:
    assert run(ranks, contexts_after, how) == expected
