"""Log lines are placed on the time axis of the run."""

from pathlib import Path

import pytest

from megabatch.report.events import events_of, marked
from megabatch.report.view import read_run
from megabatch.runs import files
from tests.support.made_up_run import make_run

LOG = """\
2026-11-17 20:00:00 begins at step 0
2026-11-17 20:00:10 warning: rows of metrics cannot be written to /x: No space left on device
2026-11-17 20:00:20 rank 1: RuntimeError: boom
  Traceback (most recent call last):
  RuntimeError: boom at step 900000
2026-11-17 21:00:00 begins at step 40
2026-11-17 21:00:05 saved: again, after step 50
2026-11-17 21:01:00 finished after step 100
"""


def test_log_lines_are_placed_at_their_step_and_wall_time(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=100, evaluations=4)
    (folder / files.LOG).write_text(LOG)
    view = read_run(folder)
    events = events_of(view)
    assert [event.kind for event in events] == ["start", "warning", "fault", "resumed", "note", "end"]
    start, warning, fault, resumed, note, end = events
    assert (start.step, start.wall_s) == (0, 0.0)
    assert warning.wall_s == pytest.approx(10) and fault.wall_s == pytest.approx(20)
    steps, walls = list(view.steps.of["step"]), list(view.steps.end_s)
    assert warning.step == next(step for step, wall_s in zip(steps, walls, strict=True) if wall_s >= 10)
    assert (resumed.step, resumed.wall_s) == (40, walls[39])
    assert (note.step, end.step) == (50, 100)
    assert [event.kind for event in marked(events)] == ["warning", "fault", "resumed"]
