"""What a step in the middle of a run asks of the host and of the device, counted on one rank of many."""

from pathlib import Path

import pytest
from megabatch_lab.rehearsal.backends import Collective

from megabatch.planning.topology import regular
from tests.support.pictures import write_files
from tests.support.rank_pool import RankPool
from tests.support.rehearsals import Step, mirrored, on, steady_step, tiny_for

PRECISIONS = ("fp32", "fp16", "bf16", "amp")
ALGORITHMS = ("flat", "hierarchical", "torus")


def step_of(ranks: RankPool, num_ranks: int, *overrides: str, number: int = 13, traces: bool = False) -> Step:
    config = tiny_for(num_ranks, *overrides)
    (step,) = ranks.run(steady_step, config, number, traces, num_ranks=1, join=mirrored(num_ranks, ranks_per_node=2))
    assert isinstance(step, Step)
    return step


@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_host_never_waits_for_the_device(ranks: RankPool, precision: str, optimizer: str) -> None:
    algorithm = ALGORITHMS[PRECISIONS.index(precision) % 3]
    overrides = (f"precision.name={precision}", f"optim.name={optimizer}", f"comm.algorithm={algorithm}")
    step = step_of(ranks, 8, *overrides)
    assert step.waits == [] and step.hazards == []


def test_the_host_never_waits_for_the_device_in_the_first_steps_either(ranks: RankPool) -> None:
    assert step_of(ranks, 8, "precision.name=fp16", "comm.algorithm=torus", number=4).waits == []


def test_the_host_never_waits_for_images_that_threads_decode(ranks: RankPool, tmp_path: Path) -> None:
    names = [f"train/class{number % 2}/{number:03d}.jpg" for number in range(160)]
    write_files(tmp_path, [*names, "val/class0/0.jpg", "val/class1/1.jpg"])
    step = step_of(ranks, 8, f"data.source={tmp_path}", "batch.global=8", "batch.micro=1", "precision.name=bf16")
    assert step.waits == [] and step.hazards == []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_launches_do_not_depend_on_the_number_of_ranks(ranks: RankPool, algorithm: str) -> None:
    overrides = ("precision.name=fp16", f"comm.algorithm={algorithm}")
    few, more, many = (step_of(ranks, num_ranks, *overrides).launches for num_ranks in (8, 256, 2048))
    assert few == more == many


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_hook_allocates_nothing_and_a_process_group_has_one_stream(ranks: RankPool, algorithm: str) -> None:
    """One for the node, and one for the network: the allocator keeps memory apart for every stream that it has seen."""
    step = step_of(ranks, 8, "precision.name=fp16", f"comm.algorithm={algorithm}", traces=True)
    allocated = [seen for seen in step.traced if seen.kind == "allocation" and seen.where.startswith("comm/")]
    assert not allocated
    used = {(collective.num_members, collective.stream) for collective in step.collectives}
    streams = [stream for _, stream in used]
    assert used and len({num_members for num_members, _ in used}) == len(set(streams)) == len(used) and 0 not in streams


def kind_of(collective: Collective) -> tuple[str, str, int]:
    """Without its size: slices of ranks differ by an element."""
    return collective.op, str(collective.dtype), collective.num_members


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_ranks_take_the_same_collectives_in_the_same_order(ranks: RankPool, algorithm: str) -> None:
    config = tiny_for(4, "precision.name=fp16", f"comm.algorithm={algorithm}")
    steps = ranks.run(steady_step, config, 5, num_ranks=4, join=on("cuda", regular(2, 2)))
    lists = [[kind_of(collective) for collective in step.collectives] for step in steps]
    assert lists[0] and lists[0] == lists[2] and lists[1] == lists[3]
    assert lists[0] == lists[1] or algorithm == "hierarchical"  # in which the first of each host does more
