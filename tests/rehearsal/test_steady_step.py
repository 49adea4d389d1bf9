"""Launches, waits and allocations of a step in the middle of a run, on one rank of many."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from megabatch_lab.rehearsal import fake_cuda
from megabatch_lab.rehearsal.backends import Collective
from megabatch_lab.rehearsal.device_decoder import NAME
from torch import nn

from megabatch.config.schema import RunConfig
from megabatch.optim import LARS, parameter_groups
from megabatch.planning.topology import regular
from megabatch.ranks.world import World
from megabatch.training.drift import compare_ranks
from tests.support.pictures import write_files
from tests.support.rank_pool import RankPool, RanksFailed
from tests.support.rehearsals import SteadyStep, begin, mirrored, on, steady_step, tiny, tiny_for

PRECISIONS = ("fp32", "fp16", "bf16", "amp")
ALGORITHMS = ("flat", "hierarchical", "torus")


def step_of(ranks: RankPool, num_ranks: int, *overrides: str, number: int = 13, traces: bool = False) -> SteadyStep:
    config = tiny_for(num_ranks, *overrides)
    (step,) = ranks.run(steady_step, config, number, traces, num_ranks=1, join=mirrored(num_ranks, ranks_per_node=2))
    assert isinstance(step, SteadyStep)
    return step


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [*product(PRECISIONS, ("sgd", "lars")), ("fp16", "adamw"), ("amp", "lamb"), ("fp16", "muon")],
)
def test_host_never_waits_for_the_device(ranks: RankPool, precision: str, optimizer: str) -> None:
    algorithm = ALGORITHMS[PRECISIONS.index(precision) % 3]
    overrides = (f"precision.name={precision}", f"optim.name={optimizer}", f"comm.algorithm={algorithm}")
    average = ("train.ema_half_life_epochs=1",) if optimizer == "lars" else ()
    step = step_of(ranks, 8, *overrides, *average, "train.noise_every=13")
    assert step.waits == [] and step.hazards == []


def test_host_never_waits_for_the_device_in_the_first_steps(ranks: RankPool) -> None:
    assert step_of(ranks, 8, "precision.name=fp16", "comm.algorithm=torus", number=4).waits == []


def images_in(folder: Path) -> tuple[str, ...]:
    """Write photos, and return the settings of a run that decodes them."""
    names = [f"train/class{number % 2}/{number:03d}.jpg" for number in range(160)]
    write_files(folder, [*names, "val/class0/0.jpg", "val/class1/1.jpg"])
    return f"data.source={folder}", "data.crop_padding=0", "data.crop_area=0.5", "batch.global=8", "batch.micro=1"


@pytest.mark.parametrize("decoder", ["cpu", NAME])
def test_host_never_waits_for_the_device_with_decoding_threads(ranks: RankPool, tmp_path: Path, decoder: str) -> None:
    step = step_of(ranks, 8, *images_in(tmp_path), f"data.decoder={decoder}", "precision.name=bf16")
    assert step.waits == [] and step.hazards == []


def step_without_pinning(world: World, config: RunConfig) -> SteadyStep:
    """Train although memory of another process cannot be pinned, as in some virtual machines."""

    def register(address: int, size: int, flags: int) -> int:
        torch.ops.rehearsal.fail()
        return 1

    with patch.object(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register)):
        return steady_step(world, config)


def test_memory_that_cannot_be_pinned_is_copied_and_fails_no_later_launch(ranks: RankPool, tmp_path: Path) -> None:
    config = tiny_for(8, *images_in(tmp_path))
    (step,) = ranks.run(step_without_pinning, config, num_ranks=1, join=mirrored(8, ranks_per_node=2))
    assert step.waits == [] and step.hazards == []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_launches_do_not_depend_on_the_number_of_ranks(ranks: RankPool, algorithm: str) -> None:
    overrides = ("precision.name=fp16", f"comm.algorithm={algorithm}")
    few, more, many = (step_of(ranks, num_ranks, *overrides).launches for num_ranks in (8, 256, 2048))
    assert few == more == many


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_hook_allocates_nothing_and_uses_one_stream_per_process_group(ranks: RankPool, algorithm: str) -> None:
    """There is one stream for the node and one for the network: the allocator separates memory by stream."""
    step = step_of(ranks, 8, "precision.name=fp16", f"comm.algorithm={algorithm}", traces=True)
    allocated = [seen for seen in step.traced if seen.kind == "allocation" and seen.where.startswith("comm/")]
    assert not allocated
    used = {(collective.num_members, collective.stream) for collective in step.collectives}
    streams = [stream for _, stream in used]
    assert used and len({num_members for num_members, _ in used}) == len(set(streams)) == len(used) and 0 not in streams


def kind_of(collective: Collective) -> tuple[str, str, int]:
    """Return the collective without its size, because slices of ranks differ by an element."""
    return collective.op, str(collective.dtype), collective.num_members


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_ranks_take_the_same_collectives_in_the_same_order(ranks: RankPool, algorithm: str) -> None:
    config = tiny_for(4, "precision.name=fp16", f"comm.algorithm={algorithm}")
    steps = ranks.run(steady_step, config, 5, num_ranks=4, join=on("cuda", regular(2, 2)))
    lists = [[kind_of(collective) for collective in step.collectives] for step in steps]
    assert lists[0] and lists[0] == lists[2] and lists[1] == lists[3]
    assert lists[0] == lists[1] or algorithm == "hierarchical"  # the first rank of each node does more


def launches_of_norms(world: World, num_layers: int) -> dict[str, int]:
    """Return the launches of LARS's norms for a network with `num_layers` weights and as many biases."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(num_layers)]).to(world.device)
    optimizer = LARS(parameter_groups(model, weight_decay=1e-4), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.gradient_norm()  # allocates the rows
    optimizer.step()
    fake_cuda.reset()
    optimizer.gradient_norm()
    return dict(fake_cuda.launches())


def test_launches_of_lars_norms_do_not_depend_on_the_number_of_weights(ranks: RankPool) -> None:
    few, many = (ranks.run(launches_of_norms, count, num_ranks=1, join=mirrored(1, 1))[0] for count in (2, 50))
    assert few and few == many


def test_microbatches_in_a_graph_are_one_launch_each_and_the_host_never_waits(ranks: RankPool) -> None:
    """The last microbatch of a step is all-reduced and is not in the graph."""
    settings = ("model.cuda_graphs=true", "precision.name=fp16", "optim.name=lars", "data.synthetic.train=2560")
    four, eight = (step_of(ranks, 8, f"batch.global={16 * count}", *settings) for count in (4, 8))
    for step, count in ((four, 4), (eight, 8)):
        assert step.waits == [] and step.hazards == []
        assert step.launches["rehearsal::graph"] == count - 1
    assert four.launches["aten::convolution"] == eight.launches["aten::convolution"] > 0
    copied, added, updated, cloned, replayed = 4, 1, 3, 1, 1  # from the host and within the device; BatchNorm
    more = sum(eight.launches.values()) - sum(four.launches.values())
    assert more <= 4 * (copied + added + updated + cloned + replayed)


def waiting_network(num_classes: int, in_channels: int) -> nn.Module:
    """Return a network whose forward pass reads a value of the device."""

    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / max(1.0, x.abs().max().item())

    return nn.Sequential(Waits(), nn.Flatten(), nn.Linear(in_channels * 144, num_classes))


def test_network_that_waits_for_the_device_cannot_be_in_a_graph(ranks: RankPool) -> None:
    network = (f"model.name={__name__}:waiting_network", "model.options={}", "batch.global=64", "batch.micro=2")
    with pytest.raises(RanksFailed, match=r"UserError: model\.cuda_graphs=true: torch cannot capture.*capturing"):
        step_of(ranks, 8, *network, "model.cuda_graphs=true")


def launches_of_comparison(world: World, num_layers: int) -> int:
    training = begin(tiny(f"model.name={__name__}:deep", f"model.options={{depth = {num_layers}}}"), world)
    compare_ranks(training, 0)
    fake_cuda.reset()
    compare_ranks(training, 0)
    return fake_cuda.launches().total()


def deep(num_classes: int, in_channels: int, depth: int) -> nn.Module:
    layers = [nn.Linear(8, 8) for _ in range(depth)]
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * 144, 8), *layers, nn.Linear(8, num_classes))


def test_launches_of_a_comparison_do_not_depend_on_the_number_of_small_tensors(ranks: RankPool) -> None:
    few, many = (ranks.run(launches_of_comparison, depth, num_ranks=1, join=mirrored(1, 1))[0] for depth in (2, 30))
    assert 0 < few == many
