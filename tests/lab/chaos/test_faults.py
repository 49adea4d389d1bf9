from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from megabatch_lab.chaos.faults import (
    FAULTS_A_RUN,
    LASTING,
    ONE_HOST,
    TWO_HOSTS,
    WRITE_SHARE,
    Fault,
    Kind,
    Timeline,
    arrange,
    draw,
    locate,
)

TIMELINE = Timeline(ranks_s=2.0, steps_s=[(4.0, 1), (5.0, 3), (8.0, 10)], total_s=10.0)


def fault(share: float, kind: Kind = "rank") -> Fault:
    return Fault(kind=kind, share=share, at_write=False, victim=0.0, hold=0.0)


@given(seed=st.integers(0, 2**32), deck=st.sampled_from([ONE_HOST, TWO_HOSTS]))
def test_block_has_every_kind_of_the_deck_and_times_over_the_whole_run(seed: int, deck: tuple[Kind, ...]) -> None:
    num_runs = len(deck)  # FAULTS_A_RUN blocks
    faults = [fault for number in range(1, num_runs + 1) for fault in draw(seed, number, deck)]
    for begin in range(0, len(faults), len(deck)):
        block = faults[begin : begin + len(deck)]
        assert Counter(fault.kind for fault in block) == Counter(deck)
        assert sorted(int(fault.share * len(deck)) for fault in block) == list(range(len(deck)))
        assert sum(fault.at_write for fault in block) == round(WRITE_SHARE * len(deck)) > 0
    assert len(faults) == FAULTS_A_RUN * len(deck)


def test_faults_depend_only_on_seed_and_number() -> None:
    assert draw(7, 5, ONE_HOST) == draw(7, 5, ONE_HOST)
    assert draw(7, 5, ONE_HOST) != draw(8, 5, ONE_HOST) and draw(7, 5, ONE_HOST) != draw(7, 6, ONE_HOST)


def test_locate_gives_a_share_of_start_up_or_a_step_and_a_delay() -> None:
    assert locate(fault(0.1), TIMELINE).startup == 0.25
    for share, step, delay_s in ((0.4, 1, 0.0), (0.45, 1, 0.5), (0.6, 3, 1.0), (0.99, 10, 1.9)):
        found = locate(fault(share), TIMELINE)
        assert found.startup is None and (found.step, round(found.delay_s, 9)) == (step, delay_s)
    for kind in LASTING:
        assert locate(fault(0.999, kind), TIMELINE).step == 3  # ends before the run


def test_arrange_sorts_faults_in_steps_and_keeps_start_up_in_place() -> None:
    given = [fault(0.9), fault(0.1), fault(0.5)]
    assert [fault.share for fault, _ in arrange(given, TIMELINE)] == [0.5, 0.1, 0.9]
