from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megabatch_lab.rehearsal import fake_cuda

from megabatch.data.pipeline import reader
from megabatch.ranks.world import World
from megabatch.training.checkpoint.resume import decide_start
from megabatch.training.checkpoint.save import Snapshot
from megabatch.training.checkpoint.state import training_state
from megabatch.training.loop import train
from megabatch.training.run import train_and_record
from tests.support.pictures import write_files
from tests.support.rank_pool import RankPool
from tests.support.rehearsals import begin, mirrored, on, state_of, tiny


def copy_during_steps(world: World) -> dict[str, Any]:
    """Copy the state after the third and sixth step into the same memory, and read it two steps later."""
    fake_cuda.set_lag(fake_cuda.LAG)
    training, snapshot, copies, memory = begin(tiny(), world), Snapshot(), [], []
    expected, waits = [], []
    for record in train(training, is_due=lambda done: done in (3, 6)):
        if record.step in (3, 6):
            fake_cuda.reset()
            snapshot.take(training_state(training))
            waits += fake_cuda.seen("sync")
            expected.append(state_of(training))
        elif record.step in (5, 8):
            assert snapshot.wait() >= 0
            memory.append([tensor.data_ptr() for tensor in snapshot.tensors.values()])
            copies.append(
                {
                    name: tensor.contiguous().view(-1).view(torch.uint8).numpy().copy()
                    for name, tensor in snapshot.tensors.items()
                }
            )
        if record.step == 8:
            break
    return {
        "copies": copies,
        "expected": expected,
        "waits": waits,
        "memory": memory,
        "hazards": fake_cuda.seen("hazard"),
    }


def test_snapshot_is_bitwise_the_state_of_its_step_without_waits_of_the_host(ranks: RankPool) -> None:
    result = ranks.run(copy_during_steps, num_ranks=1, join=on("cuda"))[0]
    assert not result["waits"] and not result["hazards"]
    assert len(result["copies"]) == 2
    for copied, expected in zip(result["copies"], result["expected"], strict=True):
        assert copied.keys() == expected.keys()
        assert all((copied[name] == content).all() for name, content in expected.items())
    first, second = result["memory"]
    is_same = [one == other for one, other in zip(first, second, strict=True)]
    assert sum(is_same) > len(is_same) / 2  # except for late tensors and scalars


def contexts_of_a_run(world: World, folder: Path) -> list[int]:
    """Train on JPEGs, evaluate and save on device 5; return the devices on which the process then has a context.

    Threads of this process decode: they query events of the device.
    """
    fake_cuda.set_lag(fake_cuda.LAG)
    fake_cuda.reset()
    settings = ("run.decode_in=threads", "checkpoint.every_steps=2")
    config = tiny(f"data.source={folder / 'images'}", f"run.dir={folder / 'run'}", *settings)
    training = begin(config, world)
    with mock.patch.object(reader, "PREFETCHED_IMAGES", 1):  # so that buffers are reused, after a look at their events
        train_and_record(config, decide_start(config, "auto", world), training)
    found = fake_cuda.contexts()
    torch.accelerator.set_device_index(0)
    return found


def test_decoding_evaluating_and_saving_make_no_context_on_another_device(ranks: RankPool, tmp_path: Path) -> None:
    names = [f"train/class{number % 2}/{number:03d}.jpg" for number in range(80)]
    write_files(tmp_path / "images", [*names, "val/class0/0.jpg", "val/class1/1.jpg"])
    assert ranks.run(contexts_of_a_run, tmp_path, num_ranks=1, join=mirrored(1, 1, local_rank=5)) == [[5]]
