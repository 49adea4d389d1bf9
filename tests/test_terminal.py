"""Output to a terminal: names and texts from users cannot contain terminal commands."""

import ast
import io
import json
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from rich.progress import Progress, TextColumn
from rich.text import Text
from typer.testing import CliRunner

import megabatch
from megabatch.cli.app import app, main
from megabatch.cli.show import print_preview
from megabatch.config.loading import load_config
from megabatch.io.terminal import Terminal, is_watched, plain_table
from megabatch.ranks.lifecycle import print_failure
from megabatch.ranks.world import current_rank
from megabatch.runs.folder import append_to_log
from megabatch.text import lines_of, listed, name_ranks, one_line, print_line
from megabatch.training.prepare import prepare
from megabatch.training.run import train_and_record
from tests.support.pictures import write_files

PACKAGE = Path(megabatch.__file__).parent
HOSTILE = "a[bold red]b[/] [link=http://x]c[/link] \x1b[31m\x1b]0;title\x07\x9b2J\r\x00\x7f\u202e\udcff"
OWN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")  # rich's escape sequences: colours and cursor positions


def require_harmless(output: str) -> None:
    assert all(character.isprintable() or character == "\n" for character in output), output


def test_long_lists_end_with_the_number_of_further_names() -> None:
    assert [listed("abc", most) for most in (1, 2, 3)] == ["a and 2 more", "a, b and 1 more", "a, b, c"]
    assert [name_ranks([3]), name_ranks([3, 5])] == ["rank 3", "ranks 3, 5"]
    assert name_ranks(range(2_000)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1,992 more"
    assert [name_ranks([3], 4), name_ranks([], 4), name_ranks([], 1)] == ["ranks 3 and 3 more", "4 ranks", "1 rank"]


def test_one_line_is_printable_for_all_characters() -> None:
    every = "".join(map(chr, range(0x300))) + "\u2028\u2029\u202e\ud800\U000e0001"
    assert one_line(every).isprintable() and len(one_line(every)) == len(every)
    require_harmless(lines_of(every))
    assert lines_of("one\n two") == "one\n two"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_only_richs_escape_sequences_reach_a_terminal(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR" if is_terminal else "NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with redirect_stdout(io.StringIO()) as written:
        console = Terminal()
        assert console.is_terminal == is_terminal
        console.row(HOSTILE, HOSTILE)
        console.title(HOSTILE, HOSTILE)
        console.print(HOSTILE, style="bold")
        console.print(Text(HOSTILE))
        table = plain_table()
        table.add_column(HOSTILE)
        table.add_row(HOSTILE, Text(HOSTILE))
        console.print(table)
        with Progress(TextColumn("{task.fields[text]}", markup=False), console=console) as bar:
            bar.add_task("", text=HOSTILE)
        with console.status(Text(HOSTILE)):
            pass
    output = OWN.sub("", written.getvalue()) if is_terminal else written.getvalue()
    require_harmless(output)
    assert output.count("[bold red]") >= 9 and "?[31m" in output
    assert bool(OWN.search(written.getvalue())) == is_terminal


def test_a_line_break_in_a_name_does_not_start_a_second_line() -> None:
    with redirect_stdout(io.StringIO()) as written:
        Terminal().row("recipe", "x\nfinished  top-1 1.0000")
        print_line("x\nmegabatch: all is well")
    assert len(written.getvalue().splitlines()) == 2


def test_only_these_files_print() -> None:
    """All output goes through the functions that this file tests."""
    printers = {"print", "echo", "secho", "Console", "get_console", "print_exc", "pprint"}
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                owner = ast.unparse(getattr(node.func, "value", ast.Constant("")))
                is_print = name in printers and not owner.endswith(("console", "self"))
                is_write = name == "write" and owner in ("sys.stdout", "sys.stderr")
                if is_print or is_write:
                    found.append(path.relative_to(PACKAGE).as_posix())
            if isinstance(node, ast.ImportFrom) and str(node.module) in ("rich", "rich.console", "rich.markup"):
                found.append(path.relative_to(PACKAGE).as_posix())
    assert set(found) == {"text.py", "io/terminal.py"}


def test_only_help_texts_contain_markup() -> None:
    """The terminal prints texts literally, so markup in them would be visible."""
    for path in sorted(
        set(PACKAGE.rglob("*.py")) - set((PACKAGE / "fuzz").glob("*.py"))
    ):  # its texts are hostile on purpose
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "[/" in node.value:
                assert "megabatch " in node.value, f"{path}: {node.value}"  # help texts, which typer renders


def test_a_traceback_keeps_only_its_line_breaks() -> None:
    with redirect_stderr(io.StringIO()) as written:
        print_failure(f"megabatch: {HOSTILE}", f"Traceback\n  File {HOSTILE}\nValueError\n")
    require_harmless(written.getvalue())
    assert [line[:9] for line in written.getvalue().splitlines()] == [
        "Traceback",
        "  File a[",
        "ValueErro",
        "megabatch",
    ]


def test_only_log_records_start_with_a_date(tmp_path: Path) -> None:
    append_to_log(tmp_path, f"skipped: {HOSTILE}\n2026-01-01 00:00:00 finished after step 7")
    append_to_log(tmp_path, "finished after step 3")
    text = (tmp_path / "train.log").read_text()
    require_harmless(text)
    assert len([line for line in text.splitlines() if re.match(r"\d{4}-", line)]) == 2


def test_a_run_on_hostile_names_prints_them_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Train, evaluate, predict and list, with escapes and markup in names of classes, files and folders."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    folder = Path("set [bold]x[bold]")
    write_files(folder, [f"{name}/{number}.jpg" for name in ("[red]cat[red]", "[link=x]dog") for number in range(8)])
    (folder / "[link=x]dog" / "0.jpg").rename(folder / "[link=x]dog" / "a[green]\x1b[2Jb.jpg")
    (folder / "[link=x]dog" / "z[blink]\x1b[31mbroken.jpg").write_bytes(b"no image")
    recipe = Path("[blue]mine.toml")
    small = [
        "model.name=small_cnn",
        "model.options.width=4",
        "data.image_size=16",
        "data.on_error=skip",
        "data.skip_limit=1",
        "data.validation=0.3",
        "batch.global=8",
        "batch.micro=4",
        "train.epochs=2",
        "schedule.warmup_epochs=0",
        "run.threads=1",
        "run.dir=run [bold]",
        f"data.source={folder}",
    ]
    recipe.write_text(load_config("photos", [*small, "about=[red]about[red]"]).to_toml())
    config = load_config(str(recipe))
    with prepare(config, current_rank(), resume="auto") as ready:
        train_and_record(ready.config, ready.start, ready.training)
    print_preview(config, 1, [str(recipe)])
    run = str(config.run.dir)
    words = ["runs", "."], ["eval", run], ["predict", run, str(folder / "[link=x]dog")], ["show", str(recipe)]
    results = [CliRunner().invoke(app, each) for each in words]
    assert [result.exit_code for result in results] == [0] * 4
    out, errors = capfd.readouterr()
    for text in (out, errors, *(result.output for result in results), (Path(run) / "train.log").read_text()):
        require_harmless(text)
    listed, evaluated, predicted, shown = (result.output for result in results)
    assert "set [bold]x[bold]" in out and "run [bold]" in out and "run [bold]" in listed
    assert "z[blink]?[31mbroken.jpg" in out + evaluated + predicted
    assert "[red]cat[red]" in evaluated and "[link=x]dog" in evaluated and "a[green]?[2Jb.jpg: " in predicted
    assert "[red]about[red]" in shown
    as_json = CliRunner().invoke(app, ["predict", run, str(folder / "[link=x]dog"), "--json"])
    require_harmless(as_json.output)
    images = [json.loads(line)["image"] for line in as_json.output.splitlines() if line.startswith("{")]
    assert str(folder / "[link=x]dog" / "a[green]?[2Jb.jpg") in images


def test_invalid_arguments_are_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (
        ["show", "x\x1b[31m"],
        ["x\x1b[31m"],
        ["show", "--x\x1b"],
        ["show", "--ranks", "\x1b"],
        ["show", "a\n=1"],
    ):
        monkeypatch.setattr(sys, "argv", ["megabatch", *words])
        with redirect_stderr(io.StringIO()) as written, pytest.raises(SystemExit) as ended:
            main()
        require_harmless(written.getvalue())
        assert ended.value.code == 2 and len(written.getvalue().splitlines()) == 1


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_that_are_forced_into_a_file_are_not_live(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    with redirect_stdout(io.StringIO()):  # a file of a batch system
        assert Terminal().is_terminal and not Terminal().is_live
    with redirect_stdout(Tty()):
        assert Terminal().is_live
        monkeypatch.setenv("TERM", "dumb")
        assert not Terminal().is_live


def test_a_terminal_that_mpiexec_gives_its_ranks_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [{"OMPI_COMM_WORLD_RANK": "0"}, {"PMI_SIZE": "4"}]
    others: list[dict[str, str]] = [
        {},
        {"PMI_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "2"},
    ]  # a shell of srun; torchrun
    assert [is_watched(each) for each in (*ranks, *others)] == [False, False, True, True, True]
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not Terminal().is_terminal
