import contextlib
import os
from pathlib import Path

import msgspec
import pytest

from megabatch.errors import UserError
from megabatch.runs.folder import RunFolder
from megabatch.runs.reader import (
    epoch_losses,
    is_run,
    last_record,
    length_up_to,
    list_runs,
    read_environment,
    read_records,
    started_in,
)
from megabatch.runs.records import EvaluationRecord, Record, StepTimes
from megabatch.runs.totals import RunTotals
from tests.support.records import step_record

EVALUATION = EvaluationRecord(
    step=2,
    epoch=1.0,
    top1=0.5,
    top5=0.9,
    test_loss=1.0,
    class_top1=[],
    samples_evaluated=4,
    wall_s=1.0,
    times=StepTimes(),
)
RECORDS: list[Record] = [step_record(1, epoch=0.5, loss=4.0), step_record(2, epoch=1.0, loss=2.0), EVALUATION]


def write_run(path: Path, records: list[Record], status: str | None = None) -> None:
    with RunFolder(path) as folder:
        folder.begin('name = "x"\n', {}, step=0)
        for record in records:
            folder.write(record)
        if status:
            folder.finish(RunTotals(global_batch=1, target_top1=None).summary(status))  # type: ignore[arg-type]


def test_written_records_read_back_and_every_row_has_its_kind(tmp_path: Path) -> None:
    write_run(tmp_path, RECORDS)
    assert list(read_records(tmp_path)) == RECORDS
    rows = [msgspec.json.decode(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["step", "step", "evaluation"]


def test_incomplete_row_is_not_read(tmp_path: Path) -> None:
    write_run(tmp_path, RECORDS[:2])
    with (tmp_path / "metrics.jsonl").open("a") as rows:
        rows.write('{"kind":"step","step":3,"epoch":')
    assert list(read_records(tmp_path)) == RECORDS[:2]
    assert last_record(tmp_path) == RECORDS[1]


def test_last_row_of_a_long_run_is_found(tmp_path: Path) -> None:
    assert last_record(tmp_path) is None
    write_run(tmp_path, [step_record(step, epoch=step / 10, loss=1.0) for step in range(1, 2000)])
    last = last_record(tmp_path)
    assert last is not None and last.step == 1999


@pytest.mark.parametrize("key", ["kind", "wall_s", "times"])
@pytest.mark.parametrize("place", [0, 2])
def test_row_without_a_required_field_is_rejected(tmp_path: Path, key: str, place: int) -> None:
    write_run(tmp_path, RECORDS[place : place + 1])
    rows = tmp_path / "metrics.jsonl"
    row = msgspec.json.decode(rows.read_bytes())
    del row[key]
    rows.write_bytes(msgspec.json.encode(row) + b"\n")
    for read in (lambda path: list(read_records(path)), last_record):
        with pytest.raises(UserError, match=rf"row.*`{key}`; it is damaged: delete the run or train it again$"):
            read(tmp_path)


def test_damaged_row_is_a_user_error(tmp_path: Path) -> None:
    write_run(tmp_path, RECORDS)
    with (tmp_path / "metrics.jsonl").open("a") as rows:
        rows.write('{"step":3,"lr":"fast"}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl, row 4: .*damaged") as caught:
        list(read_records(tmp_path))
    assert "\n" not in str(caught.value)


def test_last_row_of_any_length_is_read(tmp_path: Path) -> None:
    unreadable = [f"images/{number}.jpg cannot be read" for number in range(20_000)]
    long = msgspec.structs.replace(EVALUATION, unreadable=unreadable)
    write_run(tmp_path, [*RECORDS[:2], long])
    assert last_record(tmp_path) == long


def test_epoch_losses_are_means_over_the_steps_of_each_epoch(tmp_path: Path) -> None:
    losses = [(0.5, 4.0), (1.0, 2.0), (1.2, 8.0)]
    write_run(tmp_path, [step_record(1, epoch=epoch, loss=loss) for epoch, loss in losses])
    assert epoch_losses(tmp_path) == {1: 3.0, 2: 8.0}


def test_runs_are_listed_with_their_status(tmp_path: Path) -> None:
    write_run(tmp_path / "a", RECORDS, "finished")
    write_run(tmp_path / "b", RECORDS)
    (tmp_path / "no-run").mkdir()
    with RunFolder(tmp_path / "c") as folder:
        folder.begin("", {}, step=0)
        assert is_run(tmp_path / "c")
        assert [(run.path.name, run.status) for run in list_runs(tmp_path)] == [
            ("a", "finished"),
            ("b", "killed"),
            ("c", "running"),
        ]


LIES = [b"", b"[]", b"\xff", b"[" * 100_000, b'{"status": "finished"}', b'{"status": 5}']


@pytest.mark.parametrize("content", LIES)
def test_invalid_summary_is_listed_as_damaged(tmp_path: Path, content: bytes) -> None:
    write_run(tmp_path / "a", RECORDS, "finished")
    (tmp_path / "a/summary.json").write_bytes(content)
    assert [(run.status, run.summary) for run in list_runs(tmp_path)] == [("damaged", None)]


@pytest.mark.parametrize(
    ("key", "value"),
    [("steps", -1), ("steps", 10**30), ("wall_s", 1e300), ("top1", 7.0), ("images_per_s", -1), ("saves", None)],
)
def test_values_out_of_bounds_are_damage(tmp_path: Path, key: str, value: float | None) -> None:
    write_run(tmp_path / "a", RECORDS, "finished")
    path = tmp_path / "a/summary.json"
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | {key: value}))
    assert list_runs(tmp_path)[0].status == "damaged"


def test_pipes_in_place_of_files_do_not_block(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, RECORDS)
    for name in ("summary.json", "metrics.jsonl", "env.json"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    assert last_record(run) is None and read_environment(run) == {}
    assert list_runs(tmp_path)[0].status == "damaged"


@pytest.mark.parametrize(
    "config", [b"x = " + b"[" * 100_000, b"\xff", b"name = 5", b'name = "\\u001b[31m"', b"batch = 1"]
)
def test_any_recipe_name_is_listed_in_printable_characters(tmp_path: Path, config: bytes) -> None:
    write_run(tmp_path / "a", RECORDS, "finished")
    (tmp_path / "a/config.toml").write_bytes(config)
    assert list_runs(tmp_path)[0].recipe in (None, "?[31m")


@pytest.mark.parametrize(
    "row", [b"[" * 100_000, b"5", b"{}", b'{"step": "x"}', b'{"step": -1}', b'{"step": 1e30}', b"\xff"]
)
def test_rows_are_kept_up_to_the_first_invalid_row(tmp_path: Path, row: bytes) -> None:
    write_run(tmp_path, RECORDS)
    path = tmp_path / "metrics.jsonl"
    good = path.read_bytes()
    path.write_bytes(good + row + b"\n" + good)
    assert length_up_to(path, 9) == len(good)
    with pytest.raises(UserError, match="row 4") as caught:
        list(read_records(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["metrics.jsonl", "train.log", ".lock"])
def test_links_are_not_followed_for_writing(tmp_path: Path, name: str) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "thesis.txt")
    with contextlib.suppress(OSError):
        write_run(tmp_path / "run", RECORDS)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("content", [*LIES, b'{"directory": 5}', b'{"directory": "a\\u0000b"}'])
def test_working_directory_defaults_to_the_current_one(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "env.json").write_bytes(content)
    assert started_in(tmp_path) == Path()
