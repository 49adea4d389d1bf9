"""A copy of the state on its way to the host, while the next step is begun."""

from typing import Any

import torch
from megabatch_lab.rehearsal import fake_cuda

from megabatch.ranks.world import World
from megabatch.training.checkpoint.save import Snapshot
from megabatch.training.checkpoint.state import training_state
from megabatch.training.loop import train
from tests.support.rank_pool import RankPool
from tests.support.rehearsals import begin, on, state_of, tiny


def copy_amid_steps(world: World) -> dict[str, Any]:
    """A copy after the third step and one in the same memory after the sixth, each read two steps later."""
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


def test_a_copy_has_the_bits_of_its_step_and_the_host_does_not_wait_for_it(ranks: RankPool) -> None:
    result = ranks.run(copy_amid_steps, num_ranks=1, join=on("cuda"))[0]
    assert not result["waits"] and not result["hazards"]
    assert len(result["copies"]) == 2
    for copied, expected in zip(result["copies"], result["expected"], strict=True):
        assert copied.keys() == expected.keys()
        assert all((copied[name] == content).all() for name, content in expected.items())
    first, second = result["memory"]
    is_same = [one == other for one, other in zip(first, second, strict=True)]
    assert sum(is_same) > len(is_same) / 2  # but for what is not there at first, and numbers
