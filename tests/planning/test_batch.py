import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch.errors import UserError
from megabatch.planning.batch import BatchSettings, StepPlan, check_ranks, most_ranks, plan_steps

sizes = st.integers(1, 12)


def plan_of(micro: int, accumulation: int, ranks: int, samples: int = 1000, epochs: float = 100.0) -> StepPlan:
    batch = BatchSettings(global_batch=micro * accumulation * ranks, microbatch=micro)
    return plan_steps(batch, ranks, samples, epochs)


@given(micro=sizes, accumulation=sizes, ranks=sizes, step=st.integers(0, 50))
def test_ranks_share_every_position_of_a_step_exactly_once(
    micro: int, accumulation: int, ranks: int, step: int
) -> None:
    plan = plan_of(micro, accumulation, ranks)
    positions = [
        position
        for rank in range(ranks)
        for index in plan.microbatches_of(rank)
        for position in plan.positions(step, index)
    ]
    assert positions == list(range(step * plan.global_batch, (step + 1) * plan.global_batch))


@given(micro=sizes, microbatches=st.integers(1, 24), step=st.integers(0, 50))
def test_contents_of_a_microbatch_do_not_depend_on_ranks(micro: int, microbatches: int, step: int) -> None:
    seen = {
        ranks: [plan.positions(step, index) for rank in range(ranks) for index in plan.microbatches_of(rank)]
        for ranks in range(1, microbatches + 1)
        if microbatches % ranks == 0
        for plan in [plan_of(micro, microbatches // ranks, ranks)]
    }
    assert all(positions == seen[1] for positions in seen.values())


@pytest.mark.parametrize(
    ("samples", "batch", "epochs", "steps"),
    [
        (10_000, 256, 16, 625),
        (10_000, 256, 10, 390),
        (100, 1, 0.29, 29),
        (100, 256, 3, 1),
        (1_281_167, 65_536, 90, 1759),
    ],
)
def test_steps_are_the_whole_batches_in_all_epochs(samples: int, batch: int, epochs: float, steps: int) -> None:
    assert plan_steps(BatchSettings(global_batch=batch, microbatch=1), 1, samples, epochs).num_steps == steps


@given(samples=st.integers(1, 60), batch=st.integers(1, 40), epochs=st.integers(1, 6), every=st.integers(0, 4))
def test_evaluation_follows_each_evaluated_epoch_and_the_last_step(
    samples: int, batch: int, epochs: int, every: int
) -> None:
    if epochs * samples < batch:
        return
    plan = plan_steps(BatchSettings(global_batch=batch, microbatch=batch), 1, samples, epochs, every)
    seen, expected = 0, []
    for step in range(1, plan.num_steps + 1):
        before, seen = seen, seen + batch
        wanted = range(every, epochs + 1, every) if every else ()
        crossed = any(before < samples * epoch <= seen for epoch in wanted)
        if crossed or step == plan.num_steps:
            expected.append(step)
    assert [step for step in range(1, plan.num_steps + 1) if plan.should_evaluate_after(step)] == expected


@given(batch=st.integers(1, 5000), micro=st.integers(1, 300))
def test_indivisible_batch_error_proposes_the_nearest_valid_batch(batch: int, micro: int) -> None:
    if batch % micro == 0:
        assert BatchSettings(global_batch=batch, microbatch=micro).num_microbatches == batch // micro
        return
    with pytest.raises(UserError, match=f"batch.global={batch} ") as refusal:
        BatchSettings(global_batch=batch, microbatch=micro)
    proposed = int(re.findall(r"nearest: batch.global=(\d+)", str(refusal.value))[0])
    assert proposed % micro == 0 and proposed > 0
    assert abs(proposed - batch) <= max(micro / 2, micro - batch)


@given(micro=sizes, microbatches=st.integers(1, 40), ranks=st.integers(1, 40))
def test_uneven_ranks_error_proposes_remedies_that_work(micro: int, microbatches: int, ranks: int) -> None:
    batch = BatchSettings(global_batch=micro * microbatches, microbatch=micro)
    if microbatches % ranks == 0:
        check_ranks(batch, ranks)
        assert most_ranks(batch, ranks) == ranks
        return
    with pytest.raises(UserError, match="cannot share evenly") as refusal:
        check_ranks(batch, ranks)
    found = re.search(
        r"nearest: (?:batch.micro=(\d+), .*; or )?(\d+) ranks?, or batch.global=(\d+)$", str(refusal.value)
    )
    assert found
    check_ranks(BatchSettings(global_batch=int(found[3]), microbatch=micro), ranks)
    check_ranks(batch, int(found[2]))
    share = batch.global_batch / ranks
    assert (found[1] is not None) == (share > 1 and share.is_integer())
    if found[1]:
        check_ranks(BatchSettings(global_batch=batch.global_batch, microbatch=int(found[1])), ranks)


def test_the_error_names_the_microbatch_that_fits_before_another_batch() -> None:
    """Jia et al. 2018 trained 65,536 images on 2,048 GPUs."""
    expected = (
        "batch.global=65536 makes 512 microbatches of 128, which 2048 ranks cannot share evenly; nearest: "
        "batch.micro=32, with which BatchNorm normalises over 32 images instead of 128; or 512 ranks, or "
        "batch.global=262144"
    )
    with pytest.raises(UserError) as refusal:
        check_ranks(BatchSettings(global_batch=65_536, microbatch=128), 2048)
    assert str(refusal.value) == expected


@given(samples=st.integers(1, 1000), batch=st.integers(1, 1000))
def test_less_than_one_step_error_proposes_a_remedy_that_works(samples: int, batch: int) -> None:
    settings = BatchSettings(global_batch=batch, microbatch=batch)
    with pytest.raises(UserError, match=r"less than one step") as refusal:
        plan_steps(settings, 1, samples, 0.99 * batch / samples)
    proposed = float(str(refusal.value).rpartition("=")[2])
    assert plan_steps(settings, 1, samples, proposed).num_steps >= 1


def test_zero_ranks_are_rejected() -> None:
    with pytest.raises(UserError, match=r"0 ranks.*at least one"):
        check_ranks(BatchSettings(global_batch=256, microbatch=64), 0)


def test_most_ranks_is_fast_for_a_huge_limit() -> None:
    assert most_ranks(BatchSettings(global_batch=256, microbatch=64), 10**12) == 4
