"""The thread that writes checkpoints: at most two copies, in order, the newest and the best."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megabatch.training.checkpoint.save import COPIES, BackgroundWriter, Save
from tests.support.processes import wait_until

PATIENCE_S = 30


class Disk:
    """A disk that writes nothing until its gate opens; writes of steps in `failing` fail."""

    def __init__(self, failing: set[int] | None = None) -> None:
        self.written: list[int] = []
        self.tried: list[int] = []
        self.failing = failing or set()
        self.gate = threading.Semaphore(0)

    def write(self, save: Save) -> bool:
        assert self.gate.acquire(timeout=PATIENCE_S)
        step = save.description.step
        self.tried.append(step)
        if step in self.failing:
            return False
        self.written.append(step)
        return True

    def open(self) -> None:
        self.gate.release(1000)


def save(writer: BackgroundWriter, step: int, is_best: bool = False) -> None:
    description: Any = SimpleNamespace(step=step)
    snapshot = writer.take_spare(for_best=is_best)
    if snapshot:
        writer.submit(Save(snapshot, description, is_best, None))


def begun(writer: BackgroundWriter) -> None:
    """Wait until the thread has taken the first save."""
    wait_until(lambda: writer.current is not None, PATIENCE_S)


def test_a_newer_save_replaces_a_pending_one_without_waiting_for_the_disk() -> None:
    disk = Disk()
    writer = BackgroundWriter(disk.write)
    assert not writer.is_busy
    save(writer, 1)
    begun(writer)
    for step in (2, 3, 4):
        save(writer, step)
    assert writer.is_busy and disk.written == [] and not writer.spare
    disk.open()
    writer.drain()
    assert disk.written == [1, 4] and writer.num_overtaken == 2
    assert not writer.is_busy and len(writer.spare) == COPIES
    writer.close()


def test_the_third_save_waits_if_all_are_written() -> None:
    disk = Disk()
    writer = BackgroundWriter(disk.write, writes_all=True)
    save(writer, 1)
    save(writer, 2)
    third = threading.Thread(target=save, args=(writer, 3))
    third.start()
    third.join(0.05)
    assert third.is_alive() and disk.written == []
    disk.open()
    third.join(PATIENCE_S)
    writer.drain()
    assert disk.written == [1, 2, 3] and writer.num_overtaken == 0
    writer.close()


def test_a_pending_best_save_is_replaced_only_by_a_better_one() -> None:
    disk = Disk()
    writer = BackgroundWriter(disk.write)
    save(writer, 1)
    begun(writer)
    save(writer, 2, is_best=True)
    save(writer, 3)
    save(writer, 4, is_best=True)
    save(writer, 5)
    disk.open()
    writer.drain()
    assert disk.written == [1, 4] and writer.num_overtaken == 3
    writer.close()


def test_close_writes_pending_saves_and_ends_the_thread() -> None:
    disk = Disk()
    writer = BackgroundWriter(disk.write)
    save(writer, 1)
    save(writer, 2)
    disk.open()
    writer.close()
    assert disk.written == [1, 2]
    assert not any(thread.name == "checkpoints" for thread in threading.enumerate())


def test_only_a_failed_best_save_is_retried_before_the_next() -> None:
    disk = Disk(failing={1, 2})
    writer = BackgroundWriter(disk.write)
    disk.open()
    for step, is_best in ((1, True), (2, False)):
        save(writer, step, is_best)
        writer.drain()
    assert disk.tried == [1, 1, 2]
    disk.failing.clear()
    save(writer, 3)
    writer.drain()
    assert disk.written == [1, 3] and len(writer.spare) == COPIES
    writer.close()


def test_a_better_save_replaces_a_failed_best_save() -> None:
    disk = Disk(failing={1, 2, 3})
    writer = BackgroundWriter(disk.write)
    disk.open()
    for step in (1, 2, 3):
        save(writer, step, is_best=True)
        writer.drain()
    assert disk.tried == [1, 2, 3] and len(writer.spare) == COPIES - 1
    disk.failing.clear()
    save(writer, 4)
    writer.drain()
    assert disk.written == [3, 4]
    writer.close()


def test_an_exception_in_the_thread_is_raised_in_the_caller() -> None:
    def write(save: Save) -> bool:
        raise KeyError("ours")

    writer = BackgroundWriter(write)
    save(writer, 1)
    with pytest.raises(KeyError, match="ours"):
        writer.drain()
    writer.close()


def test_memory_is_reserved_in_the_background_and_used_by_the_first_copy() -> None:
    state = {"weight": torch.ones(3, 4).T, "half": torch.ones(5, dtype=torch.bfloat16), "number": torch.tensor(7)}
    writer = BackgroundWriter(lambda save: True)
    writer.reserve(state)
    assert writer.reserving is not None
    writer.reserving.join(PATIENCE_S)
    assert not writer.is_busy and len(writer.spare) == COPIES
    snapshot = writer.take_spare(for_best=False)
    assert snapshot is not None
    before = {name: tensor.data_ptr() for name, tensor in snapshot.tensors.items()}
    snapshot.take(state)
    assert before == {name: tensor.data_ptr() for name, tensor in snapshot.tensors.items()} and len(before) == 3
    assert all(torch.equal(snapshot.tensors[name], tensor) for name, tensor in state.items())
    writer.close()
