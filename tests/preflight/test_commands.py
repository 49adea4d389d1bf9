import shlex

import pytest

from megabatch.preflight.preview import Devices, start_commands

CPU, GPUS = Devices("cpu", 2, is_typical=False), Devices("cuda", 4, is_typical=True)
CORES = Devices("cpu", 2, is_typical=True)  # run.device=cpu


@pytest.mark.parametrize(("num_ranks", "here"), [(1, CPU), (2, CPU), (4, GPUS), (3, GPUS)])
def test_run_that_fits_is_started_on_this_node(num_ranks: int, here: Devices) -> None:
    commands = start_commands(["photos", "data.source=my photos"], num_ranks, here)
    assert commands == [f"megabatch train photos 'data.source=my photos' --ranks {num_ranks}"]


@pytest.mark.parametrize(
    ("num_ranks", "here", "hosts", "per_host"),
    [(8, GPUS, "2", "4"), (8, CORES, "4", "2"), (512, CPU, "64", "8"), (6, GPUS, "NODES", "GPUS")],
)
def test_larger_run_is_started_on_several_nodes(num_ranks: int, here: Devices, hosts: str, per_host: str) -> None:
    (command,) = start_commands(["my.toml"], num_ranks, here)
    words = shlex.split(command, comments=True)
    assert words[:3] == ["torchrun", f"--nnodes={hosts}", f"--nproc-per-node={per_host}"]
    assert words[-4:] == ["-m", "megabatch", "train", "my.toml"]
    assert "--ranks" not in words  # torchrun starts the ranks


def test_without_local_gpus_both_commands_for_eight_are_shown() -> None:
    one_node, several = start_commands(["resnet50-imagenet-4k"], 8, CPU)
    assert one_node == "megabatch train resnet50-imagenet-4k --ranks 8  # on a node with 8 GPUs"
    assert several.startswith("torchrun --nnodes=NODES --nproc-per-node=GPUS ") and several.endswith("NODES x GPUS = 8")


def test_ranks_use_local_devices_if_they_suffice() -> None:
    assert [CPU.kind_for(2), CPU.kind_for(3), CORES.kind_for(3), GPUS.kind_for(8)] == ["cpu", "cuda", "cpu", "cuda"]
