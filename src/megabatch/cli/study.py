"""megabatch study: claims about accuracy, put to the test at a size that a desktop can repeat."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabatch.errors import UserError
from megabatch.ranks.lifecycle import speaking_for_ranks

if TYPE_CHECKING:
    from megabatch.experiments.design import Design
    from megabatch.experiments.evidence import Study


def study(
    name: Annotated[
        str | None, typer.Argument(metavar="[STUDY]", help="A name, or a TOML file.  Without it, names are listed.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where the runs are kept, and resume.  Default: runs/study-<name>.", show_default=False),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(help="Where the page, its figures and its JSON go; runs that are in the JSON are not repeated."),
    ] = Path("docs/studies"),
    jobs: Annotated[int | None, typer.Option(help="Runs at a time, of one rank each.  Default: one per core.")] = None,
) -> None:
    """Find out by many runs whether one way to train is as good as another; takes hours, and resumes when stopped."""
    from megabatch.experiments.design import read_design

    if name is None:
        list_studies()
    else:
        run_study(read_design(name), shlex.join(["megabatch", "study", name]), folder, out, jobs)


def list_studies() -> None:
    from rich.text import Text

    from megabatch.experiments.design import known_studies, read_design
    from megabatch.io.terminal import BOLD, Terminal

    console = Terminal()
    for design in map(read_design, known_studies()):
        console.print(Text.assemble((design.name, BOLD), f"  {design.num_trials} runs: {design.title}"))
    console.print("\nmegabatch study STUDY runs one of these, or the study of a TOML file (docs/studies.md).")


def run_study(design: "Design", command: str, folder: Path | None, out: Path, jobs: int | None) -> None:
    from functools import partial

    from megabatch.experiments.conduct import Conductor, End
    from megabatch.experiments.drawing import require_matplotlib
    from megabatch.experiments.page import write_study
    from megabatch.experiments.trials import SweepScreen, Trial, choose_jobs, run_trials
    from megabatch.experiments.verdict import judge
    from megabatch.user_code import import_own_code

    require_matplotlib()  # all that can be wrong is found before the hours that it takes
    check_arms(design)
    probes = {curve: import_own_code(f"curves.{curve}", code) for curve, code in design.curves.items()}
    jobs = choose_jobs(jobs, "auto")
    before = read_before(design, out)
    folder = folder or Path("runs") / f"study-{design.name}"
    screen = SweepScreen(design.num_trials - (before.num_runs if before else 0), jobs)

    def run(trials: Sequence[Trial], on_end: End) -> None:
        run_trials(trials, folder, jobs, screen, on_end)

    conductor = Conductor(
        design, folder, command, run, probes, partial(write_study, folder=out), before, str(json_file(design, out))
    )
    screen.say("study", f"{design.name}: {design.title}")
    screen.say("runs", f"{design.num_trials} in {folder}, {jobs} at a time; stopped, the same command resumes")
    if before:
        are = "runs are" if before.num_runs != 1 else "run is"
        screen.say("kept", f"{before.num_runs} {are} in {json_file(design, out)}; not again")
    with speaking_for_ranks():
        found = conductor.conduct()
    for criterion in found.criteria:
        verdict = judge(found, criterion)
        screen.say({True: "holds", False: "missed", None: "untold"}[verdict.holds], verdict.text)
    for path in write_study(found, out):
        screen.say("written", str(path))


def check_arms(design: "Design") -> None:
    from megabatch.config.loading import load_config, silent
    from megabatch.config.resolve import plan_run
    from megabatch.data.catalog import infer_shape
    from megabatch.experiments.plan import Point, search_trial, seed_trial

    for arm in design.arms:
        trials = [seed_trial(design, arm, Point(1.0), seed=1)]
        trials += [search_trial(design, arm, Point(1.0))] if arm.learning_rates else []
        for trial in trials:
            config = load_config(trial.recipe, trial.overrides, report=silent)
            plan_run(config, infer_shape(config.data), num_ranks=1)


def read_before(design: "Design", out: Path) -> "Study | None":
    """The results that are there already."""
    from megabatch.experiments.page import load_study

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be used ({error.strerror}); give another folder") from None
    path = json_file(design, out)
    return load_study(path) if path.exists() else None


def json_file(design: "Design", out: Path) -> Path:
    return out / f"{design.name}.json"
