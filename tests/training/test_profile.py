from typing import Any

import pytest
import torch

from megabatch.config.resolve import make_model
from megabatch.data.catalog import infer_shape
from megabatch.errors import UserError
from megabatch.preflight.profile import choose_microbatches, noise_like, record, time_pass, time_update
from megabatch.ranks.world import World
from megabatch.simulate.profile import Profile
from megabatch.training.build import assemble
from megabatch.training.prepare import WarmUpPass
from tests.support.rank_pool import RankPool
from tests.support.small_runs import small_run

OWN = ["batch.micro=8", "precision.name=bf16"]


@pytest.mark.parametrize(
    ("microbatch", "expected"), [(64, [16, 32, 64]), (9, [2, 4, 9]), (7, [3, 7]), (5, [2, 5]), (4, [2, 4])]
)
def test_a_microbatch_is_timed_with_its_half_and_quarter(microbatch: int, expected: list[int]) -> None:
    assert choose_microbatches(microbatch) == expected


@pytest.mark.parametrize("microbatch", [1, 2, 3])
def test_a_microbatch_without_a_half_is_refused(microbatch: int) -> None:
    with pytest.raises(UserError, match=rf"batch.micro={microbatch}: .*; nearest: batch.micro=4"):
        choose_microbatches(microbatch)


def recorded(world: World, *overrides: str) -> tuple[Profile, list[str]]:
    lines: list[str] = []
    return record(small_run(*overrides), world, 0.0, lines.append), lines


def test_a_profile_has_every_gradient_of_the_network_and_every_leaf(ranks: RankPool) -> None:
    profile, lines = ranks.run(recorded, *OWN, num_ranks=1)[0]
    config = small_run(*OWN)
    network = make_model(config, infer_shape(config.data))
    parameters = {name: parameter.numel() for name, parameter in network.named_parameters()}
    assert {gradient.name: gradient.num_elements for gradient in profile.gradients} == parameters
    assert profile.gradients[0].name.startswith("8.")  # the head's gradient is the first
    assert profile.gradients[-1].name.startswith("0.")
    dtypes = {gradient.name: gradient.dtype for gradient in profile.gradients}
    assert (dtypes["0.0.weight"], dtypes["0.1.weight"]) == ("bf16", "fp32")  # BatchNorm stays in fp32
    assert profile.microbatches == [2, 4, 8]
    assert (profile.num_classes, profile.image_size, profile.threads) == (6, 12, 1)
    leaves = [name for name, module in network.named_modules() if not list(module.children())]
    assert all(list(point.forward_by_layer_s) == leaves for point in profile.points)
    assert profile.update_s > 0
    assert len(lines) == 1
    assert "2, 4, 8 images, 3 times each" in lines[0]


def test_missing_images_are_not_needed(ranks: RankPool) -> None:
    profile, _ = ranks.run(recorded, *OWN, "data.source=nowhere", num_ranks=1)[0]
    assert profile.num_classes == 10  # assumed, as by `megabatch show`


def test_a_profile_is_of_one_rank(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"2 ranks were started.*needs one"):
        ranks.run(recorded, *OWN, num_ranks=2)


def changed_by_recording(world: World, *overrides: str) -> dict[str, float]:
    config = small_run(*overrides)
    parts = assemble(config, noise_like(infer_shape(config.data), config.data.image_size), world)
    before = {name: parameter.clone() for name, parameter in parts.network.named_parameters()}
    images, labels = parts.images.microbatch(0, 0)
    for group in parts.optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(2):
        time_pass(WarmUpPass(settings=config.model, images=images, labels=labels, parts=parts))
        time_update(parts)
    after: dict[str, Any] = dict(parts.network.named_parameters())
    return {name: float(torch.dist(before[name], after[name])) for name in before}


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_recording_trains_nothing(ranks: RankPool, precision: str) -> None:
    moved = ranks.run(changed_by_recording, f"precision.name={precision}", "optim.weight_decay=0.1", num_ranks=1)[0]
    assert set(moved.values()) == {0.0}
