import pytest
import torch
import torch.distributed as dist

from megabatch.errors import UserError
from megabatch.ranks.discover import RankInfo
from megabatch.ranks.world import choose_device, choose_index, own_device


@pytest.mark.parametrize("num_visible", [2, 4, 8])
def test_ranks_of_a_host_that_all_see_its_devices_take_one_each(num_visible: int) -> None:
    for num_local_ranks in range(1, num_visible + 1):
        chosen = [choose_index(rank, num_local_ranks, num_visible) for rank in range(num_local_ranks)]
        assert chosen == list(range(num_local_ranks))


def test_a_rank_that_sees_one_device_takes_it_whatever_its_place_on_the_host() -> None:
    assert [choose_index(rank, 8, 1) for rank in range(8)] == [0] * 8


def test_more_ranks_than_devices_are_one_line() -> None:
    with pytest.raises(UserError, match=r"^8 ranks on this host see 4 devices, .* nearest: 4 ranks on a host$"):
        choose_index(5, 8, 4)


@pytest.mark.parametrize(
    ("accelerator", "name", "chosen"),
    [
        (None, "auto", "cpu"),
        ("cuda", "auto", "cuda"),
        ("mps", "auto", "cpu"),  # for which there is no backend
        ("cuda", "cpu", "cpu"),
        ("cuda", "cuda", "cuda"),
    ],
)
def test_auto_is_the_accelerator_that_there_is_a_backend_for(
    monkeypatch: pytest.MonkeyPatch, accelerator: str | None, name: str, chosen: str
) -> None:
    found = torch.device(accelerator) if accelerator else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    assert choose_device(name) == chosen


def test_a_device_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    with pytest.raises(UserError, match=r"^run.device='cuda', but torch finds no CUDA device here; nearest: run.dev"):
        choose_device("cuda")
    with pytest.raises(UserError, match=r"^run.device='gpu' is not one of auto, cpu, cuda; nearest"):
        choose_device("gpu")


@pytest.mark.parametrize(
    ("is_joined", "current", "num_visible", "expected"),
    [
        (False, 0, 8, 5),
        (False, 0, 1, 0),  # srun --gpus-per-task=1
        (True, 3, 8, 3),  # a script has joined the ranks, and set its device
        (True, 0, 8, 5),
    ],
)
def test_a_rank_has_the_device_of_its_place_unless_its_script_has_set_one(
    monkeypatch: pytest.MonkeyPatch, is_joined: bool, current: int, num_visible: int, expected: int
) -> None:
    was_set: list[int] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: is_joined)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: num_visible)
    monkeypatch.setattr(torch.accelerator, "set_device_index", was_set.append)
    assert own_device(RankInfo(13, 16, 5, 8), "cuda") == torch.device("cuda", expected)
    assert was_set == [expected]
    assert own_device(RankInfo(13, 16, 5, 8), "cpu") == torch.device("cpu") and was_set == [expected]
