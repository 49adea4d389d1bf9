"""Every command and script of docs/use.md runs, on a model that was trained on a few photos."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from megabatch.cli import app
from tests.support.photos import make_folder
from tests.support.use import train_photos

PAGE = Path(__file__).parents[1] / "docs/use.md"


def run_line(line: str) -> str:
    """A shell's line, with the last command of a pipe in this process: starting torch takes seconds."""
    before, _, command = line.rpartition("|")
    command, _, out = command.partition(" > ")
    given = subprocess.run(["bash", "-c", before], capture_output=True, check=True).stdout if before else None
    program, *arguments = shlex.split(command)
    assert program == "megabatch"
    result = CliRunner().invoke(app, arguments, input=given, catch_exceptions=False)
    assert result.exit_code == 0, f"{line}: {result.output}"
    if out:
        Path(out.strip()).write_text(result.stdout)
    return result.stdout


def test_every_command_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "my_photos", per_class=6)
    for name in ("picture.jpg", "a.jpg"):
        shutil.copy("my_photos/bag/000.jpg", name)
    Image.open("a.jpg").save("b.png")
    train_photos(Path("runs/photos-001"), "data.source=my_photos", "train.epochs=2")
    ran = []
    for language, text in re.findall(r"^```(python)?\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE):
        if language:
            exec(compile(text, str(PAGE), "exec"), {})
            continue
        for line in text.splitlines():
            line = line.partition("  #")[0].replace("RUN", "runs/photos-001").replace("FOLDER", "my_photos")
            if not line.startswith("megabatch train"):  # which was done above
                ran.append(run_line(line.replace("step-00000390", "last")))
    assert len(ran) == 11
    assert Path("predictions.csv").read_text().startswith("image,rank,class,probability\n")
