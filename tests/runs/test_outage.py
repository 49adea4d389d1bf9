import errno
from pathlib import Path

from megabatch.runs.folder import LONGEST_PAUSE_S, Outage, pause_s

FULL = OSError(errno.ENOSPC, "No space left on device", "runs/x/metrics.jsonl")


def test_each_reason_and_the_recovery_are_reported_once() -> None:
    reported: list[tuple[str, str]] = []
    outage = Outage(lambda name, text: reported.append((name, text)))
    outage.worked("rows")
    for _ in range(3):
        outage.failed("rows", Path("x"), FULL)
        outage.failed("checkpoints", Path("x"), FULL)
    assert reported == [
        (
            "warning",
            "rows cannot be written to runs/x/metrics.jsonl: No space left on device; training continues and "
            "retries; free some space on that disk",
        )
    ]
    with outage.survived("checkpoints", Path("x")):
        raise PermissionError(errno.EACCES, "Permission denied", "runs/x/checkpoints")
    assert len(reported) == 2 and "Permission denied" in reported[1][1] and "check its permissions" in reported[1][1]
    outage.worked("checkpoints")
    assert len(reported) == 2
    with outage.survived("rows", Path("x")):
        pass
    assert reported[2:] == [("saved", "all pending data is written")]


def test_attempts_become_rarer_up_to_a_minute() -> None:
    pauses = [pause_s(failures) for failures in range(1, 3000)]
    assert pauses[:7] == [1, 2, 4, 8, 16, 32, 60] and set(pauses[6:]) == {LONGEST_PAUSE_S}
