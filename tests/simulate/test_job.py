"""The division of a job among ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from megabatch.errors import UserError
from megabatch.planning.batch import StepPlan
from megabatch.planning.plan import CommDtype
from megabatch.simulate.compute import CURVES, GRADIENTS
from megabatch.simulate.job import (
    Job,
    count_evaluations,
    job_of_model,
    notes,
    share_batch,
    share_images,
    with_batch_per_rank,
    with_profile,
)
from megabatch.simulate.load import load_cluster
from megabatch.simulate.profile import Profile, ProfiledGradient, ProfilePoint
from megabatch.simulate.request import ModelSettings
from megabatch.simulate.scenario import simulate
from megabatch.simulate.step import AllReduceSettings
from megabatch.simulate.workload import load_workload, scaled

RESNET = load_workload("resnet50")
PAPER = load_cluster("p40-roce100")
RECIPE = Job(
    name="recipe",
    workload=RESNET,
    precision="fp16",
    global_batch=65536,
    microbatch=128,
    num_train=1_281_167,
    num_test=50_000,
    epochs=90,
)


@given(st.integers(1, 60), st.integers(1, 40), st.integers(1, 100), st.integers(0, 3))
def test_number_of_evaluations_equals_that_of_a_run(batch: int, steps: int, images: int, every: int) -> None:
    plan = StepPlan(
        global_batch=batch, microbatch=1, num_ranks=1, num_samples=images, num_steps=steps, evaluate_every=every
    )
    assert count_evaluations(plan) == sum(plan.should_evaluate_after(step) for step in range(1, steps + 1))


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 80))
def test_a_batch_is_divided_into_whole_microbatches_or_rejected(
    num_microbatches: int, microbatch: int, num_ranks: int
) -> None:
    batch = num_microbatches * microbatch
    shareable = [
        ranks
        for ranks in range(1, batch + 1)
        if batch % ranks == 0 and (batch // ranks <= microbatch or batch // ranks % microbatch == 0)
    ]
    if num_ranks in shareable:
        num_images, accumulation = share_batch(batch, microbatch, num_ranks)
        assert num_images * num_ranks == batch and num_images % accumulation == 0
        assert num_images // accumulation == min(microbatch, num_images)
    else:
        with pytest.raises(UserError) as refused:
            share_batch(batch, microbatch, num_ranks)
        below = max(ranks for ranks in shareable if ranks < num_ranks)
        above = [ranks for ranks in shareable if ranks > num_ranks][:1]
        assert f"--ranks {below}{''.join(f' or {ranks}' for ranks in above)}, " in str(refused.value)


def test_images_of_a_rank_are_whole_microbatches() -> None:
    assert share_images(256, None) == (256, 1)
    assert share_images(256, 64) == (256, 4)
    assert share_images(32, 64) == (32, 1)
    with pytest.raises(UserError, match="nearest: --batch-per-rank 128"):
        share_images(100, 64)


def test_notes_on_batches_that_differ_from_the_recipe() -> None:
    assert notes(RECIPE, [8, 512], 65536) == []
    (note,) = notes(RECIPE, [512, 1024, 2048], 65536)
    assert note.startswith("at 1,024 and 2,048 ranks, a rank has 64 and 32 images, fewer than batch.micro=128")
    assert "set batch.micro=64 or 32" in note
    (note,) = notes(with_batch_per_rank(RECIPE, 256), [8], 65536)
    assert "--batch-per-rank 256" in note and "65,536" in note and "learning rates are not" in note
    of_steps = replace(RECIPE, epochs=None, num_steps=100)
    (note,) = notes(with_batch_per_rank(of_steps, 256), [8], 65536)
    assert "neither" in note and "train.steps=100" in note


@pytest.mark.parametrize("precision", GRADIENTS)
@pytest.mark.parametrize("comm_dtype", [None, "same", "bf16", "fp16"])
def test_note_on_a_comm_dtype_without_effect(precision: str, comm_dtype: CommDtype | None) -> None:
    cluster = load_cluster("p40-roce100")
    job = replace(RECIPE, precision=precision, all_reduce=AllReduceSettings(dtype=comm_dtype or "same"))
    if CURVES.get(precision, precision) not in cluster.device.curves:
        curves = {CURVES.get(precision, precision): next(iter(cluster.device.curves.values()))}
        cluster = replace(cluster, device=replace(cluster.device, curves=curves))
    in_use = job.scenario(cluster, 512).in_use.dtype
    found = notes(job, [512], 65536, comm_dtype)
    assert bool(found) == (comm_dtype not in (None, "same", in_use) and in_use != "same")
    assert all(
        f"--comm-dtype {comm_dtype} has no effect" in note and f"gradients are {in_use}" in note for note in found
    )


def test_the_global_batch_decides_the_steps() -> None:
    scenario = RECIPE.scenario(PAPER, 512)
    assert (scenario.batch_per_rank, scenario.accumulation) == (128, 1)
    assert scenario.length and scenario.length.num_steps == 90 * 1_281_167 // 65536
    larger = with_batch_per_rank(RECIPE, 256).scenario(PAPER, 512)
    assert (larger.batch_per_rank, larger.accumulation, larger.global_batch) == (256, 2, 131072)
    assert larger.length and larger.length.num_steps == 90 * 1_281_167 // 131072


def test_a_model_without_a_recipe_uses_16_bits_and_the_measured_batch() -> None:
    job = job_of_model(RESNET, PAPER, ModelSettings(), AllReduceSettings(), None, 1000, 100)
    assert (job.precision, job.batch_per_rank, job.has_length) == ("fp16", 64, False)
    fp32 = ModelSettings(precision="fp32", image_size=192, epochs=90)
    job = job_of_model(RESNET, PAPER, fp32, AllReduceSettings(), 7, 1000, 100)
    assert (job.precision, job.batch_per_rank, job.workload.image_size, job.epochs) == ("fp32", 7, 192, 90)
    assert job.scenario(PAPER, 100).global_batch == 700  # nothing has to divide
    with pytest.raises(UserError, match=r"precision\.name='fp8' is not one of"):
        job_of_model(RESNET, PAPER, ModelSettings(precision="fp8"), AllReduceSettings(), 7, 1000, 100)


def test_a_microbatch_that_does_not_fit_on_the_device_is_rejected() -> None:
    job = job_of_model(RESNET, PAPER, ModelSettings(), AllReduceSettings(), 10_000, 1000, 100)
    with pytest.raises(UserError, match="P40 has 24; nearest: "):
        job.scenario(PAPER, 8)


STAGED = replace(RECIPE, workload=scaled(RESNET, 192), sizes=[(0.0, 96), (0.25, 192)], test_side=256)


def test_a_job_with_sizes_takes_the_time_of_each_size_and_its_memory() -> None:
    result = simulate(STAGED.scenario(PAPER, 64))
    alone = {side: simulate(replace(RECIPE, workload=scaled(RESNET, side)).scenario(PAPER, 64)) for side in (96, 192)}
    small, large = result.stages
    assert (small.stage.side, large.stage.side) == (96, 192)
    assert large.step == result.step == alone[192].step
    assert small.step.computing_s == pytest.approx(alone[96].step.computing_s)
    assert small.memory_bytes < large.memory_bytes
    assert result.training and alone[192].training and result.scenario.length
    num_steps = result.scenario.length.num_steps
    assert small.stage.num_steps + large.stage.num_steps == num_steps
    expected_s = small.stage.num_steps * small.step.total_s + large.stage.num_steps * large.step.total_s
    assert result.training.steps_s == pytest.approx(expected_s)
    assert result.training.evaluation_s > alone[192].training.evaluation_s  # of images of 256 pixels
    assert [row["side"] for row in result.row["stages"]] == [96, 192]


def test_a_network_that_was_counted_for_one_size_is_refused() -> None:
    fixed = replace(STAGED, workload=replace(STAGED.workload, takes_any_size=False))
    with pytest.raises(UserError, match=r"image_size=96: resnet50 was counted for 192 pixels"):
        simulate(fixed.scenario(PAPER, 64))


PROFILE = Profile(
    model="resnet50",
    image_size=192,
    num_classes=1000,
    precision="bf16",
    device="a GPU",
    threads=1,
    gradients=[ProfiledGradient(name="head.weight", num_elements=50, dtype="bf16")],
    points=[
        ProfilePoint(
            microbatch=size, forward_s=0.01 * size, backward_s=0.02 * size, forward_by_layer_s={}, ready_s=[0.1]
        )
        for size in (16, 128)
    ],
    update_s=0.25,
)


def test_the_compute_of_a_profile_grows_with_the_area_and_its_update_does_not() -> None:
    job = with_profile(replace(STAGED, precision="bf16"), PROFILE)
    small, large = (job.scenario(PAPER, 64).compute_at(side) for side in (96, 192))
    assert small.forward_s == pytest.approx(large.forward_s / 4) and small.update_s == large.update_s
