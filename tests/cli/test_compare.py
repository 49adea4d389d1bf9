"""megabatch compare: tables on 80 columns, JSON and CSV."""

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from typer.testing import CliRunner

from megabatch.cli.app import app
from megabatch.cli.compare_screen import GAP, LONGEST_NAME, Field, lines_by_row, short_names
from megabatch.runs.comparison import RunComparison, RunOutcome, SeedGroup, compare
from tests.support.recorded_runs import record_run

HOSTILE = "a[red]b[/] \x1b[31m\x1b]0;title\x07\x9b2J\r\x7f\u202e\n\u2028,\"'="


def output(*words: str | Path) -> str:
    result = CliRunner().invoke(app, ["compare", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def record_sweep(num_rates: int, num_seeds: int) -> list[Path]:
    return [
        record_run(
            Path(f"runs/fashion-{rate:03d}-{seed}"),
            0.5 + rate / 100 + seed / 1000,
            seed=seed,
            optim__learning_rate=0.1 * (rate + 1),
            data__source=f"/images/of/{rate}",
        )
        for rate in range(num_rates)
        for seed in range(num_seeds)
    ]


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def test_two_runs_are_shown_side_by_side_with_differences() -> None:
    record_run(Path("runs/one"), 0.90)
    record_run(Path("runs/other"), 0.85, 0.9123, seed=2, optim__learning_rate=0.2)
    lines = [line.split() for line in output("runs/one", "runs/other").splitlines()]
    for line in (
        ["one", "other"],
        ["seed", "1", "2"],
        ["optim.learning_rate", "0.1", "0.2"],
        ["status", "finished", "finished"],
        ["top-1", "0.9000", "0.9123"],
        ["vs", "first", "+0.0123"],
        ["s", "to", "0.9", "3.0", "6.0"],
        ["straggler", "rank", "1", "4%", "rank", "1", "6%"],
    ):
        assert line in lines, line
    assert not any("seeds" in line for line in lines)  # a mean needs several seeds


@pytest.mark.parametrize(("num_rates", "num_seeds"), [(1, 1), (1, 2), (2, 1), (4, 3), (3, 4), (15, 2)])
@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal_and_every_run_is_named(
    num_rates: int, num_seeds: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    paths = record_sweep(num_rates, num_seeds)
    text = output(*paths)
    assert max(map(cell_len, text.splitlines())) <= width
    assert all(path.name in text for path in paths)
    for rate in range(num_rates if num_rates > 1 else 0):
        assert f"/images/of/{rate}" in text


def test_seeds_of_a_group_are_one_line_with_an_interval() -> None:
    text = output(*record_sweep(2, 3))
    _, table = text.split("Top-1 over seeds")
    lines = [" ".join(line.split()) for line in table.splitlines()[1:]]
    assert lines == [
        "group seeds mean deviation interval vs first interval",
        "1 3 0.5010 0.0010 0.4985 to 0.5035",
        "2 3 0.5110 0.0010 0.5085 to 0.5135 +0.0100 +0.0100 to +0.0100",
        "group 1: data.source=/images/of/0, optim.learning_rate=0.1",
        "group 2: data.source=/images/of/1, optim.learning_rate=0.2; paired by seed",
    ]


def test_a_group_explains_a_missing_mean_or_a_different_interval() -> None:
    paths = record_sweep(2, 2)
    other_seed = record_run(Path("runs/third"), 0.9, seed=7, optim__learning_rate=0.1, data__source="/images/of/0")
    killed = record_run(Path("runs/killed"), 0.9, seed=8, status=None, optim__learning_rate=0.3)
    diverged = record_run(Path("runs/diverged"), 0.9, seed=8, status="diverged", optim__learning_rate=0.4)
    text = " ".join(output(*paths, other_seed, killed, diverged).split())
    assert "optim.learning_rate=0.2; different seeds, so Welch's interval" in text
    assert "1 unfinished, left out" in text and "1 diverged, so no mean" in text


def test_equal_runs_have_no_differing_settings_and_one_run_has_results() -> None:
    paths = [record_run(Path(f"runs/{name}"), 0.9) for name in "ab"]
    assert "Settings that differ none" in output(*paths)
    single = output(paths[0])
    assert "differ" not in single and "0.9000" in single


def test_json_has_the_whole_comparison() -> None:
    paths = record_sweep(2, 2)
    text = output(*paths, "--json", "--target", "0.505")
    assert msgspec.json.decode(text, type=RunComparison, strict=True) == compare(paths, 0.505)
    assert list(json.loads(text)) == ["format", "runs", "settings", "environment", "groups"]


def test_csv_has_a_row_per_run_and_a_column_per_differing_setting() -> None:
    paths = record_sweep(2, 2)
    rows = list(csv.DictReader(io.StringIO(output(*paths, "--csv"))))
    assert [row["path"] for row in rows] == [str(path) for path in paths]
    assert [row["optim.learning_rate"] for row in rows] == ["0.1", "0.1", "0.2", "0.2"]
    assert [(row["seed"], row["group"]) for row in rows] == [("0", "1"), ("1", "1"), ("0", "2"), ("1", "2")]
    assert [float(row["top1"]) for row in rows] == [run.top1 for run in compare(paths).runs]
    assert rows[0]["resumed_from_step"] == "" and None not in rows[0]


def test_hostile_names_print_on_one_line_without_escapes() -> None:
    paths = [
        record_run(Path(f"{HOSTILE}{number}"), 0.9, seed=number, data__source=HOSTILE * number) for number in (1, 2)
    ]
    screen = output(*paths)
    assert all(letter.isprintable() or letter == "\n" for letter in screen)
    assert max(map(cell_len, screen.splitlines())) <= 80
    text = output(*paths, "--json")
    assert text.isascii() and all(letter.isprintable() or letter == "\n" for letter in text)
    read = json.loads(text)
    assert [run["path"] for run in read["runs"]] == [str(path) for path in paths]
    assert read["settings"][1] == {"name": "data.source", "values": [HOSTILE, 2 * HOSTILE]}
    rows = list(csv.DictReader(io.StringIO(output(*paths, "--csv"))))
    assert len(rows) == 2 and None not in rows[0] and all(cell.isprintable() for row in rows for cell in row.values())


def test_an_undecodable_name_can_be_printed() -> None:
    path = record_run(Path("run-\udcff"), 0.9)
    for option in ([], ["--json"], ["--csv"]):
        assert "run-" in output(path, *option)


def test_long_names_are_shortened_but_stay_distinct() -> None:
    names = short_names([f"runs/{'x' * 100}{number}{'y' * 100}" for number in range(20)])
    assert len({*names}) == 20 and all(len(name) <= LONGEST_NAME for name in names)
    assert short_names(["runs/a/", "runs/b"]) == ["a", "b"] and short_names(["x/a", "y/a"]) == ["x/a", "y/a"]


@given(
    cells=st.lists(st.lists(st.text("ab漢", min_size=1, max_size=30), min_size=3, max_size=3), min_size=1, max_size=12),
    width=st.integers(1, 200),
)
def test_blocks_have_every_column_once_in_order_and_fill_the_terminal(cells: list[list[str]], width: int) -> None:
    fields = [Field(f"f{number}", column) for number, column in enumerate(cells)]
    blocks = lines_by_row(fields, ["r1", "r2", "r3"], width)
    assert [name for header, _ in blocks for name in header.split()[1:]] == [field.name for field in fields]
    for place in range(3):
        found = [cell for _, lines in blocks for cell in lines[place].split()[1:]]
        assert found == [field.cells[place] for field in fields]
    for header, lines in blocks:
        is_alone = len(header.split()) == 2
        assert max(map(cell_len, [header, *lines])) <= width or is_alone
    starts = [blocks[number + 1][0].split()[1] for number in range(len(blocks) - 1)]
    by_name = {field.name: field for field in fields}
    for (header, lines), following in zip(blocks, starts, strict=False):
        widest = max(map(cell_len, [following, *by_name[following].cells]))
        assert max(map(cell_len, [header, *lines])) + GAP + widest > width  # no column of the next block would fit


def test_compare_does_not_import_torch_or_for_one_run_numpy() -> None:
    paths = [str(path) for path in record_sweep(1, 2)]
    for given_paths, absent in ((paths, ["torch"]), (paths[:1], ["torch", "numpy", "scipy"])):
        code = (
            "import sys; from megabatch.cli.app import app\n"
            f"try: app(['compare', *{given_paths!r}], prog_name='megabatch')\n"
            f"finally: assert not {{*{absent!r}}} & {{*sys.modules}}"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert result.returncode == 0 and "fashion-000-0" in result.stdout, result.stderr


def test_the_docs_list_every_field_of_the_json() -> None:
    text = (Path(__file__).parents[2] / "docs/compare.md").read_text()
    _, *tables = text.split("| field | meaning |")
    for table, kind in zip(tables, (RunComparison, RunOutcome, SeedGroup), strict=True):
        rows = re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)
        listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
        assert sorted(listed) == sorted(kind.__struct_fields__)
