"""The failure drills of `megabatch selftest`."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from megabatch.preflight.selftest.drills import DRILLS, MARK, Output, judge, run_drill

OF = {drill.fault: drill for drill in DRILLS}
NAMED = "megabatch: rank 1: RuntimeError: selftest drill (traceback in /secret/train.log)"
STOPPED = "megabatch: rank 0: MissingRank: step 4: rank 1 did not arrive within 10 s"


def output_of(*lines: tuple[float, str]) -> Any:
    output = SimpleNamespace(lines=list(lines))
    output.time_of = lambda is_wanted: Output.time_of(output, is_wanted)  # type: ignore[arg-type]
    return output


@pytest.mark.parametrize(
    ("fault", "line", "exit_code", "passed"),
    [
        ("backward", (5.0, NAMED), 1, True),
        ("backward", (5.0, NAMED), 0, False),
        ("backward", (90.0, NAMED), 1, False),  # too late
        ("backward", (5.0, NAMED.replace("rank 1", "rank 0")), 1, False),  # another rank
        ("backward", (5.0, "megabatch: rank 1: was ended by SIGABRT"), 1, False),  # another cause
        ("SIGKILL", (5.0, "megabatch: rank 1: was ended by SIGKILL"), 1, True),
        ("SIGSTOP", (5.0, STOPPED), 1, True),
        ("SIGSTOP", (5.0, STOPPED.replace("rank 1", "rank 2")), 1, False),
    ],
)
def test_line_must_name_the_rank_and_the_cause_in_time(
    fault: str, line: tuple[float, str], exit_code: int, passed: bool
) -> None:
    check = judge("drill", OF[fault], output_of((1.0, "step 1"), (2.0, MARK), line), 100.0, exit_code)
    assert check.passed is passed and "secret" not in check.found
    assert check.measurements["seconds_to_end"] == 98.0
    assert check.measurements.get("seconds_to_line") in (None, line[0] - 2.0)


def test_run_that_ends_before_the_fault_fails() -> None:
    check = judge("drill", OF["load"], output_of((1.0, "megabatch: no GPU in /secret/place")), 2.0, 2)
    assert check.passed is False and check.found == "the run ended before the fault: megabatch: no GPU in (path)"


@pytest.mark.lab
def test_every_drill_names_the_failed_rank() -> None:
    with ThreadPoolExecutor(2) as at_once:
        checks = list(at_once.map(lambda drill: run_drill(drill, "cpu", 2), DRILLS))
    assert all(check.passed for check in checks), [check for check in checks if not check.passed]
    assert all(0 <= check.measurements["seconds_to_line"] <= check.measurements["seconds_to_end"] for check in checks)
