import pytest

from megabatch.errors import UserError
from megabatch.ranks.devices import choose_index, infer_local_rank


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


def test_without_a_launcher_hosts_are_filled_one_after_another() -> None:
    assert [infer_local_rank(rank, 16, 8) for rank in (0, 7, 8, 15)] == [(0, 8), (7, 8), (0, 8), (7, 8)]
    assert [infer_local_rank(rank, 2, 8) for rank in (0, 1)] == [(0, 2), (1, 2)]
    assert infer_local_rank(5, 16, 0) == (5, 16)  # on CPUs nobody asks
    assert choose_index(*infer_local_rank(5, 16, 1), 1) == 0
