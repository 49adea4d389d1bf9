import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megabatch.errors import UserError
from megabatch.ranks import devices
from megabatch.ranks.devices import choose_device, choose_device_index, require_kernels, set_rank_device
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.machine import bind_near_device


@pytest.mark.parametrize("num_visible", [2, 4, 8])
def test_ranks_that_see_all_devices_use_one_each(num_visible: int) -> None:
    for num_local_ranks in range(1, num_visible + 1):
        chosen = [choose_device_index(rank, num_local_ranks, num_visible) for rank in range(num_local_ranks)]
        assert chosen == list(range(num_local_ranks))


def test_a_rank_that_sees_one_device_uses_it() -> None:
    assert [choose_device_index(rank, 8, 1) for rank in range(8)] == [0] * 8


def test_more_ranks_than_devices_fail() -> None:
    with pytest.raises(UserError, match=r"^8 ranks on this node .*4 devices.*nearest: 4"):
        choose_device_index(5, 8, 4)


@pytest.mark.parametrize(
    ("accelerator", "name", "chosen"),
    [
        (None, "auto", "cpu"),
        ("cuda", "auto", "cuda"),
        ("mps", "auto", "cpu"),  # it has no backend
        ("cuda", "cpu", "cpu"),
        ("cuda", "cuda", "cuda"),
    ],
)
def test_auto_is_the_accelerator_if_it_has_a_backend(
    monkeypatch: pytest.MonkeyPatch, accelerator: str | None, name: str, chosen: str
) -> None:
    found = torch.device(accelerator) if accelerator else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    assert choose_device(name) == chosen


def test_a_missing_device_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    with pytest.raises(UserError, match=r"^run.device='cuda'.*no CUDA device.*nearest: run.dev"):
        choose_device("cuda")
    with pytest.raises(UserError, match=r"^run.device='gpu' .*auto, cpu, cuda; nearest"):
        choose_device("gpu")


@pytest.mark.parametrize(
    ("is_joined", "current", "num_visible", "expected"),
    [
        (False, 0, 8, 5),
        (False, 0, 1, 0),  # srun --gpus-per-task=1
        (True, 3, 8, 3),  # the script created the process group and set its device
        (True, 0, 8, 5),
    ],
)
def test_device_follows_the_local_rank_unless_the_script_set_one(
    monkeypatch: pytest.MonkeyPatch, is_joined: bool, current: int, num_visible: int, expected: int
) -> None:
    was_set: list[int] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: is_joined)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: num_visible)
    monkeypatch.setattr(torch.accelerator, "set_device_index", was_set.append)
    bound: list[tuple[list[str], int]] = []
    near = SimpleNamespace(name="GPU", major=9, minor=0, pci_domain_id=0, pci_bus_id=0xAF, pci_device_id=1)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])  # a CPU build has an empty list
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: near)
    monkeypatch.setattr(devices, "bind_near_device", lambda lists, index: bound.append((list(map(str, lists)), index)))
    assert set_rank_device(RankInfo(13, 16, 5, 8), "cuda") == torch.device("cuda", expected)
    lists = ["/sys/bus/pci/devices/0000:af:01.0/local_cpulist"] * num_visible
    assert was_set == [expected] and bound == ([] if is_joined else [(lists, expected)])
    assert set_rank_device(RankInfo(13, 16, 5, 8), "cpu") == torch.device("cpu") and was_set == [expected]


@pytest.mark.parametrize(
    ("usable", "lists", "index", "bound"),
    [
        (range(8), ["0-3", "0-3", "4-7", "4-7"], 2, {4, 5, 6, 7}),
        (range(8), ["0-1,4-5", "2-3,6-7"], 0, {0, 1, 4, 5}),  # hyperthreads
        (range(2, 6), ["0-3", "4-7"], 1, {4, 5}),  # a launcher assigned the cores
        (range(8), ["0-3", "0-3"], 0, set()),  # cores would be left over
        (range(8), ["0-7", "0-7"], 1, set()),
        (range(4), ["0-3", "4-7"], 1, set()),
        (range(8), ["0-3", None], 0, set()),
        (range(8), ["0-3", "garbage"], 0, set()),
    ],
)
def test_a_rank_runs_on_the_cores_near_its_device(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    usable: range,
    lists: list[str | None],
    index: int,
    bound: set[int],
) -> None:
    paths = [tmp_path / str(number) for number in range(len(lists))]
    for path, text in zip(paths, lists, strict=True):
        if text is not None:
            path.write_text(f"{text}\n")
    set_to: dict[int, set[int]] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(usable))
    monkeypatch.setattr(os, "sched_setaffinity", lambda task, cores: set_to.update({task: set(cores)}))
    (tmp_path / "tasks").mkdir()
    for task in ("11", "12"):
        (tmp_path / "tasks" / task).mkdir()
    assert bind_near_device(paths, index, tmp_path / "tasks") == bound
    assert set_to == ({11: bound, 12: bound} if bound else {})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with a GPU, in which torch for CUDA 13.0 finds no device."""

    def init() -> None:
        raise RuntimeError("Error 802: system not yet initialized\nmore")

    (tmp_path / "nvidia0").touch()
    (tmp_path / "version").write_text(driver_file("580.65.06"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "DEVICE_FILES", tmp_path)
    monkeypatch.setattr(devices, "NVIDIA_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    return tmp_path


def driver_file(version: str) -> str:
    kernel = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (root@host)"
    return f"{kernel}\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_an_old_driver_is_an_error_and_does_not_train_on_the_cpu(machine: Path, name: str) -> None:
    (machine / "version").write_text(driver_file("535.104.05"))
    with pytest.raises(UserError, match=r"driver is 535.104.05, .*CUDA 13.0, .*580 .*; upd"):
        choose_device(name)
    assert choose_device("cpu") == "cpu"


def test_a_gpu_that_torch_cannot_use_is_an_error_with_cudas_reason(machine: Path) -> None:
    with pytest.raises(UserError, match=r"nvidia0 .*torch cannot use it \(Error 802: [^\n]*\); repair"):
        choose_device("auto")


@pytest.mark.parametrize("lacks", ["node", "CUDA", "visible devices"])
def test_auto_is_the_cpu_if_no_gpu_is_meant_to_be_used(
    machine: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    if lacks == "node":
        (machine / "nvidia0").unlink()
    elif lacks == "CUDA":
        monkeypatch.setattr(torch.version, "cuda", None)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device("auto") == "cpu"


CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("capability", "remedy"), [((7, 0), "install torch for CUDA 12.6"), ((11, 0), "a newer torch")]
)
def test_a_gpu_without_kernels_is_an_error(capability: tuple[int, int], remedy: str) -> None:
    with pytest.raises(UserError, match=rf"^GPU 3 .* has compute capability {capability[0]}.0, .*{remedy}, or set run"):
        require_kernels("GPU 3 (Tesla V100)", capability, CUDA_13)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (12, 1), (13, 0)])
def test_kernels_run_on_later_gpus_of_their_generation_and_those_to_be_compiled_on_all_later_ones(
    capability: tuple[int, int],
) -> None:
    require_kernels("GPU 0", capability, CUDA_13)
    require_kernels("GPU 0", capability, [])  # not known
