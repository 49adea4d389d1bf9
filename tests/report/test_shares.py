"""The time breakdown adds up to the wall time."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from megabatch.report.view import STAGES, TimeColumns, bins_of, read_run, shares_of
from megabatch.runs.records import Record, StepTimes, TimeBreakdown
from tests.support.made_up_run import made_up_records, make_run
from tests.support.records import step_record

SECONDS = st.floats(-1e-3, 1e3)
TIMES = st.builds(
    StepTimes,
    data=SECONDS,
    forward=SECONDS,
    backward=SECONDS,
    comm=SECONDS,
    update=SECONDS,
    evaluation=SECONDS,
    checkpoint=SECONDS,
    other=SECONDS,
)
STAGE_TIMES = st.builds(TimeBreakdown, read=SECONDS, decode=SECONDS, augment=SECONDS, copy=SECONDS)


def columns_of(records: list[Record]) -> TimeColumns:
    columns = TimeColumns()
    for record in records:
        columns.add(record)
    return columns


@given(rows=st.lists(st.tuples(TIMES, STAGE_TIMES, st.floats(0, 1e4)), min_size=1, max_size=20))
def test_parts_of_any_rows_add_up_to_the_wall_time(
    rows: list[tuple[StepTimes, TimeBreakdown, float]],
) -> None:
    """Rows may contradict their wall time, which may also decrease."""
    records: list[Record] = [
        replace(step_record(step, 1.0, 1.0), times=times, data_wait=stages, wall_s=wall_s)
        for step, (times, stages, wall_s) in enumerate(rows)
    ]
    columns = columns_of(records)
    columns.end(columns.wall_s + 1.5)
    totals = columns.totals()
    assert math.fsum(totals.values()) == pytest.approx(columns.wall_s, rel=1e-9, abs=1e-9)
    assert all(seconds >= 0 for seconds in totals.values())
    assert math.fsum(shares_of(totals).values()) == pytest.approx(1)
    bins = bins_of(columns, 7)
    assert bins.edges_s[-1] == columns.wall_s
    for key, seconds in bins.parts.items():
        assert math.fsum(seconds) == pytest.approx(totals[key], rel=1e-6, abs=1e-6)
    for place, (begin, end) in enumerate(zip(bins.edges_s, bins.edges_s[1:], strict=False)):
        inside = math.fsum(seconds[place] for seconds in bins.parts.values())
        assert inside == pytest.approx(end - begin, rel=1e-6, abs=1e-6 * columns.wall_s)


def test_consistent_rows_keep_their_parts() -> None:
    records = list(made_up_records(60, evaluations=6))
    totals = columns_of(records).totals()
    for part in ("forward", "backward", "comm", "update", "evaluation", "checkpoint"):
        assert totals[part] == pytest.approx(math.fsum(getattr(r.times, part) for r in records))
    waits = math.fsum(record.times.data for record in records)
    assert math.fsum(totals[stage] for stage in STAGES) == pytest.approx(waits) and totals["data"] == 0


def test_parts_of_a_run_add_up_to_the_wall_time_of_its_summary(tmp_path: Path) -> None:
    view = read_run(make_run(tmp_path / "run", steps=50))
    assert view.summary and math.fsum(view.times.totals().values()) == pytest.approx(view.summary.wall_s)
