import pytest
import torch
from torch import nn

from megabatch.errors import UserError
from megabatch.training.batch_norm import RunningStatistics, share_of_momentum


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2, 5])
@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.0, None])
def test_a_step_updates_statistics_once_with_the_mean_of_its_microbatches(
    accumulation: int, momentum: float | None, outside: bool
) -> None:
    norm = nn.BatchNorm1d(3, momentum=momentum, dtype=torch.float64)
    model = nn.Sequential(norm)
    statistics = RunningStatistics(model, accumulation)
    if outside:
        statistics.update_outside_graph(model)
        model(torch.randn(8, 3, dtype=torch.float64))  # a warm-up pass, whose statistics are discarded
        norm.reset_running_stats()
    mean, variance = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for step in range(4):
        microbatches = torch.randn(accumulation, 8, 3, dtype=torch.float64) * 3 + 1
        for turn, microbatch in enumerate(microbatches):
            statistics.begin_microbatch(turn)
            assert norm.momentum == 1.0 or not outside  # a compiled network treats it as a constant
            model(microbatch).sum().backward()
            with torch.no_grad():
                model.eval()(microbatch)  # like evaluation
                model.train()
        statistics.end_step(torch.cat(statistics.tensors))
        moved = 1 / (step + 1) if momentum is None else momentum
        mean = (1 - moved) * mean + moved * microbatches.mean(1).mean(0)
        variance = (1 - moved) * variance + moved * microbatches.var(1).mean(0)
        torch.testing.assert_close(norm.running_mean, mean)
        torch.testing.assert_close(norm.running_var, variance)
        assert norm.num_batches_tracked == step + 1
        assert norm.momentum == momentum


def test_shares_keep_the_weight_of_earlier_steps() -> None:
    kept = 1.0
    for turn in range(7):
        kept *= 1 - share_of_momentum(0.3, turn, 7)
    assert kept == pytest.approx(0.7)


def test_frozen_and_stateless_layers_are_unchanged() -> None:
    frozen, stateless = nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3, track_running_stats=False)
    statistics = RunningStatistics(nn.Sequential(frozen, stateless), accumulation=2)
    for turn in range(2):
        statistics.begin_microbatch(turn)
        stateless(frozen(torch.randn(4, 3)))
    assert not statistics.tensors  # no mean over ranks, which could round them
    statistics.end_step(torch.empty(0))
    assert frozen.num_batches_tracked == 0
    assert torch.equal(frozen.running_mean, torch.zeros(3))  # type: ignore[arg-type]


def test_a_frozen_layer_with_a_cumulative_average_is_unchanged() -> None:
    norm = nn.BatchNorm1d(3, momentum=None).eval()
    statistics = RunningStatistics(nn.Sequential(norm), accumulation=2)
    for _ in range(3):
        for turn in range(2):
            statistics.begin_microbatch(turn)
            norm(torch.randn(4, 3))
        statistics.end_step(torch.empty(0))
    assert norm.num_batches_tracked == 0 and norm.momentum is None


def test_a_layer_that_is_used_twice_in_a_pass_is_refused() -> None:
    norm = nn.BatchNorm1d(3)
    statistics = RunningStatistics(nn.Sequential(norm), accumulation=2)
    for turn in range(2):
        statistics.begin_microbatch(turn)
        norm(norm(torch.randn(4, 3)))
    with pytest.raises(UserError, match="0 2 times in a forward"):
        statistics.end_step(torch.cat(statistics.tensors))


def test_instance_norms_with_statistics_update_them_once_per_step() -> None:
    norm = nn.InstanceNorm1d(3, momentum=0.5, track_running_stats=True)
    statistics = RunningStatistics(nn.Sequential(norm), accumulation=2)
    microbatches = torch.randn(2, 4, 3, 10) + 2
    for turn, microbatch in enumerate(microbatches):
        statistics.begin_microbatch(turn)
        norm(microbatch)
    statistics.end_step(torch.cat(statistics.tensors))
    torch.testing.assert_close(norm.running_mean, 0.5 * microbatches.mean((0, 1, 3)))


def test_statistics_are_assigned_in_the_order_they_are_listed() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(3))
    statistics = RunningStatistics(model, accumulation=1)
    statistics.begin_microbatch(0)
    statistics.end_step(torch.arange(10.0))
    assert model[0].running_mean.tolist() == [0, 1] and model[0].running_var.tolist() == [2, 3]  # type: ignore
    assert model[1].running_mean.tolist() == [4, 5, 6] and model[1].running_var.tolist() == [7, 8, 9]  # type: ignore
