"""Invalid study files are rejected in one line before any run starts."""

import re
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from megabatch.cli.app import app
from megabatch.config.loading import load_config
from megabatch.errors import UserError
from megabatch.experiments.design import ArmDesign, Design, SearchDesign, TimeDesign, read_any_design, read_design
from megabatch.experiments.plan import SearchPoint, seed_trial
from megabatch.runs.totals import RunTotals
from tests.support.records import step_record

HEAD = 'title = "T"\nquestion = "Q"\nsetup = "S"\nrecipe = "smoke"\nbaseline = "a"\nseeds = 2\n'
SEARCH = "[search]\ntrials = 3\nheld_out = 0.2\n"
A = '[[arm]]\nname = "a"\nlearning_rate = 0.1\n'
B = '[[arm]]\nname = "b"\nlearning_rates = [0.1, 0.3]\n'


def write(folder: Path, text: str) -> str:
    (folder / "My study.toml").write_text(text)
    return str(folder / "My study.toml")


def test_user_file_is_a_study(tmp_path: Path) -> None:
    design = read_design(write(tmp_path, HEAD + SEARCH + A + B))
    assert design.name == "my-study" and [arm.name for arm in design.arms] == ["a", "b"]
    assert design.num_trials == 3 + 2 * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title = ", "My study.toml is not TOML: "),
        (HEAD, "My study.toml: Object missing required field `arm`"),
        (HEAD + A + "rate = 1\n", r"contains unknown field `rate` - at `\$.arm\[0\]`; see docs/studies.md"),
        ('name = "../x"\n' + HEAD + A, "name='../x': .*for example name='x'"),
        (HEAD.replace('"a"', '"c"') + A, "'c' is not an arm; the arms are 'a'"),
        (HEAD + A + A, "arm 'a': its folder name 'a'.*rename"),
        (HEAD + A + "learning_rate_of = 'a'\n", "arm 'a': expected one of learning_rates, learning_rate, learning_"),
        (HEAD + A + B, r"arm 'b' has learning_rates.*held_out.*\[search\]"),
        (HEAD + SEARCH + A + B + "momenta = [0.8, 0.9, 0.95]\n", "search.trials=3: arm 'b' starts with 4 .*nearest: 4"),
        (HEAD + SEARCH + A + B.replace("0.3", "0.1"), "two learning_rates, ascending, and distinct momenta"),
        (HEAD + A + "momenta = [0.9]\n", "momenta need learning_rates"),
        (HEAD + A + '[[arm]]\nname = "c"\nlearning_rate_of = "d"\n', "'d' is not an arm"),
        (
            HEAD + A + '[[criterion]]\narm = "a"\nbaseline = "a"\n',
            "the criterion of 'a' has no bound; for example max_",
        ),
        (
            HEAD + A + '[[arm]]\nname = "c"\nlearning_rate_of = "a"\n[[arm]]\nname = "d"\nlearning_rate_of = "c"\n',
            "arm 'd': learning_rate_of='c' refers to another arm",
        ),
        (HEAD + A.replace("0.1", "-1"), "Expected `float` > 0.0"),
        (HEAD.replace("seeds = 2", "seeds = 0") + A, "Expected `int` >= 1"),
        (HEAD + "[curves]\n'training loss' = 'a:b'\n" + A, "'training loss' is reserved"),
    ],
)
def test_invalid_design_is_a_user_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read_design(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match=r"study 'precison' .*nearest: precision"):
        read_design("precison")


def test_arms_are_checked_before_anything_runs(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + A + 'settings = ["optim.name=sdg"]\n')
    result = CliRunner().invoke(
        app, ["study", path, "--out", str(tmp_path / "out"), "--folder", str(tmp_path / "runs")]
    )
    assert isinstance(result.exception, UserError) and "optim.name='sdg' is not one of" in str(result.exception)
    assert not (tmp_path / "runs").exists() and not (tmp_path / "out").exists()
    path = write(tmp_path, HEAD + "[curves]\nsize = 'no.such.module:size'\n" + A)
    result = CliRunner().invoke(app, ["study", path, "--out", str(tmp_path / "out")])
    assert "curves.size='no.such.module:size' cannot be imported" in str(result.exception)


def test_studies_in_the_docs_are_valid(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "studies.md").read_text()
    timed, example = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert isinstance(read_any_design(write(tmp_path, timed)), TimeDesign)
    design = read_design(write(tmp_path, example))
    assert design.num_trials == 5 + 2 * 5
    fields = {name for struct in (Design, ArmDesign, SearchDesign) for name in struct.__struct_encode_fields__}
    assert all(f"`{name}`" in text or f"`[[{name}]]`" in text or f"`[{name}]`" in text for name in fields)


def test_trials_ignore_the_early_stopping_of_a_recipe(tmp_path: Path) -> None:
    ends_early = ["train.patience=2", "train.target_top1=0.5", "train.stop_at_target=true"]
    design = read_design(write(tmp_path, HEAD.replace("seeds = 2", f"seeds = 2\nsettings = {ends_early}") + A))
    trial = seed_trial(design, design.arms[0], SearchPoint(0.1), seed=1)
    train = load_config(trial.recipe, trial.overrides).train
    assert (train.patience, train.stop_at_target, train.evaluate_every) == (0, False, 0)


def test_study_without_its_folder_uses_the_written_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are used as on another machine.  The run exists, as if an earlier study had been stopped."""
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, HEAD.replace("seeds = 2", "seeds = 1") + A)
    design = read_design(path)
    trial = seed_trial(design, design.arms[0], SearchPoint(0.1), seed=1)
    folder = Path("runs/study-my-study") / trial.name
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(load_config(trial.recipe, trial.overrides).to_toml())
    (folder / "metrics.jsonl").write_bytes(msgspec.json.Encoder().encode_lines([step_record(1, 1.0, 2.0)]))
    summary = RunTotals(global_batch=1, target_top1=None).summary("diverged")
    (folder / "summary.json").write_bytes(msgspec.json.encode(summary))
    first = CliRunner().invoke(app, ["study", path, "--out", "out", "--jobs", "1"], env={"COLUMNS": "200"})
    assert first.exit_code == 0 and "1 trial already complete" in first.output, first.output
    written = {file.name: file.read_bytes() for file in Path("out").iterdir()}
    assert b"| a |  | 0.1 | - | - | - | baseline | 1 of 1 |" in written["my-study.md"]
    Path("runs").rename("elsewhere")
    again = CliRunner().invoke(app, ["study", path, "--out", "out", "--jobs", "1"], env={"COLUMNS": "200"})
    assert again.exit_code == 0 and "1 run from out/my-study.json, not repeated" in again.output, again.output
    assert not Path("runs").exists()
    assert {file.name: file.read_bytes() for file in Path("out").iterdir()} == written
