"""How ranks share what is to be trained."""

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
)
from megabatch.simulate.load import load_cluster
from megabatch.simulate.request import ModelSettings
from megabatch.simulate.step import AllReduceSettings
from megabatch.simulate.workload import load_workload

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
def test_evaluations_are_counted_as_a_run_makes_them(batch: int, steps: int, images: int, every: int) -> None:
    plan = StepPlan(
        global_batch=batch, microbatch=1, num_ranks=1, num_samples=images, num_steps=steps, evaluate_every=every
    )
    assert count_evaluations(plan) == sum(plan.should_evaluate_after(step) for step in range(1, steps + 1))


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 80))
def test_a_batch_is_shared_in_whole_microbatches_or_refused_with_the_nearest(
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


def test_what_the_run_itself_would_not_do_is_said() -> None:
    assert notes(RECIPE, [8, 512], 65536) == []
    (note,) = notes(RECIPE, [512, 1024, 2048], 65536)
    assert note.startswith("at 1,024 and 2,048 ranks a rank has 64 and 32 images, fewer than batch.micro=128")
    assert note.endswith("the run itself wants batch.micro=64 or 32")
    (note,) = notes(with_batch_per_rank(RECIPE, 256), [8], 65536)
    assert "--batch-per-rank 256" in note and "65,536; steps follow, learning rates do not" in note
    of_steps = replace(RECIPE, epochs=None, num_steps=100)
    (note,) = notes(with_batch_per_rank(of_steps, 256), [8], 65536)
    assert note.endswith("neither steps (train.steps=100) nor learning rates follow")


@pytest.mark.parametrize("precision", GRADIENTS)
@pytest.mark.parametrize("wire", [None, "fp32", "bf16", "fp16"])
def test_what_does_not_travel_as_asked_is_said(precision: str, wire: CommDtype | None) -> None:
    cluster = load_cluster("p40-roce100")
    job = replace(RECIPE, precision=precision, all_reduce=AllReduceSettings(dtype=wire or "fp32"))
    if CURVES.get(precision, precision) not in cluster.device.curves:
        curves = {CURVES.get(precision, precision): next(iter(cluster.device.curves.values()))}
        cluster = replace(cluster, device=replace(cluster.device, curves=curves))
    travelling = job.scenario(cluster, 512).in_use.dtype
    found = notes(job, [512], 65536, wire)
    assert bool(found) == (wire is not None and travelling != wire)
    assert all(f"--wire {wire} changes nothing" in note and f"gradients are {travelling}" in note for note in found)


def test_the_global_batch_decides_the_steps() -> None:
    scenario = RECIPE.scenario(PAPER, 512)
    assert (scenario.batch_per_rank, scenario.accumulation) == (128, 1)
    assert scenario.length and scenario.length.num_steps == 90 * 1_281_167 // 65536
    larger = with_batch_per_rank(RECIPE, 256).scenario(PAPER, 512)
    assert (larger.batch_per_rank, larger.accumulation, larger.global_batch) == (256, 2, 131072)
    assert larger.length and larger.length.num_steps == 90 * 1_281_167 // 131072


def test_a_model_alone_runs_in_16_bits_at_the_batch_that_was_measured() -> None:
    job = job_of_model(RESNET, PAPER, ModelSettings(), AllReduceSettings(), None, 1000, 100)
    assert (job.precision, job.batch_per_rank, job.has_length) == ("fp16", 64, False)
    fp32 = ModelSettings(precision="fp32", image_size=192, epochs=90)
    job = job_of_model(RESNET, PAPER, fp32, AllReduceSettings(), 7, 1000, 100)
    assert (job.precision, job.batch_per_rank, job.workload.image_size, job.epochs) == ("fp32", 7, 192, 90)
    assert job.scenario(PAPER, 100).global_batch == 700  # nothing has to divide
    with pytest.raises(UserError, match=r"precision\.name='fp8' is not one of"):
        job_of_model(RESNET, PAPER, ModelSettings(precision="fp8"), AllReduceSettings(), 7, 1000, 100)


def test_a_microbatch_that_does_not_fit_the_device_is_refused() -> None:
    job = job_of_model(RESNET, PAPER, ModelSettings(), AllReduceSettings(), 10_000, 1000, 100)
    with pytest.raises(UserError, match="P40 has 24; nearest: "):
        job.scenario(PAPER, 8)
