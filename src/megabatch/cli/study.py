"""megabatch study: experiments of many runs that compare ways to train."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabatch.errors import UserError
from megabatch.io.numbers import plural
from megabatch.ranks.lifecycle import exit_like_ranks

BATCH_LIMIT = "batch-limit"

if TYPE_CHECKING:
    from megabatch.experiments.design import Design, TimeDesign
    from megabatch.experiments.evidence import Study


def study(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[STUDY]",
            help="A name, a TOML file, batch-limit or time-to-accuracy. Default: list the studies.",
        ),
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [section.key=value]...",
            help="A recipe for batch-limit, one or more for time-to-accuracy.",
            show_default=False,
        ),
    ] = None,
    batches: Annotated[
        str | None, typer.Option(metavar="N,N", help="batch-limit: the global batches, such as 64,256,1024,4096.")
    ] = None,
    margin: Annotated[
        float, typer.Option(min=0.01, max=100, help="batch-limit: points by which accuracy may be lower.")
    ] = 0.5,
    seeds: Annotated[
        int,
        typer.Option(min=2, max=100, help="Final runs per batch (batch-limit) or per recipe (time-to-accuracy)."),
    ] = 5,
    target: Annotated[
        float | None,
        typer.Option(help="time-to-accuracy: the top-1 to reach. Default: train.target_top1 of the first recipe."),
    ] = None,
    trials: Annotated[int, typer.Option(min=3, max=100, help="batch-limit: runs of each learning-rate search.")] = 5,
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder of the runs; they resume from it. Default: runs/study-<name>.", show_default=False),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(help="Folder of the page, its charts and its JSON. Runs that the JSON contains are not repeated."),
    ] = Path("docs/studies"),
    jobs: Annotated[
        int | None,
        typer.Option(help="Concurrent runs, of one rank each. Default: one per core; for time-to-accuracy, one."),
    ] = None,
) -> None:
    """Compare ways to train, with many runs. This takes hours; after a stop, the same command resumes.

    [bold]megabatch study time-to-accuracy[/bold] fashion my.toml data.train_per_class=500 --target 0.85
    """
    from megabatch.experiments.design import TimeDesign, read_any_design
    from megabatch.experiments.time_to_accuracy import NAME

    if name == NAME:
        study_times(given or [], target, seeds, folder, out, jobs)
    elif name is None:
        list_studies()
    elif name == BATCH_LIMIT:
        limit_design = batch_limit_design(given or [], batches, margin, seeds, trials)
        options = [f"--batches={batches}", f"--margin={margin:g}", f"--seeds={seeds}", f"--trials={trials}"]
        command = shlex.join(["megabatch", "study", name, *(given or []), *options])
        run_study(limit_design, command, folder, out, jobs)
    elif given or batches is not None:
        raise UserError(
            f"{' '.join(given or ['--batches'])} has no effect on study {name}; it belongs to {BATCH_LIMIT} or {NAME}"
        )
    else:
        design, command = read_any_design(name), shlex.join(["megabatch", "study", name])
        if isinstance(design, TimeDesign):
            run_time_study(design, command, folder, out, jobs)
        else:
            run_study(design, command, folder, out, jobs)


def batch_limit_design(given: Sequence[str], batches: str | None, margin: float, seeds: int, trials: int) -> "Design":
    from megabatch.experiments.batch_limit import Limits, design_of

    example = f"for example: megabatch study {BATCH_LIMIT} fashion --batches 64,256,1024,4096"
    if not given or "=" in given[0]:
        raise UserError(f"a recipe is missing; {example}")
    if batches is None or not re.fullmatch(r"[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*", batches):
        raise UserError(f"--batches {batches or 'is missing'}: expected integers separated by commas; {example}")
    limits = Limits(
        batches=[int(batch) for batch in batches.split(",")], margin_points=margin, seeds=seeds, trials=trials
    )
    return design_of(given[0], given[1:], limits)


def study_times(
    given: Sequence[str], target: float | None, seeds: int, folder: Path | None, out: Path, jobs: int | None
) -> None:
    """Train recipes with several seeds and write the time and epochs that each needs for the target."""
    from megabatch.config.loading import load_config, silent
    from megabatch.experiments.time_to_accuracy import NAME, design_of_recipes

    recipes = [argument for argument in given if "=" not in argument]
    overrides = [argument for argument in given if "=" in argument]
    if not recipes:
        raise UserError(f"study {NAME} needs recipes; for example megabatch study {NAME} fashion --target 0.85")
    target = load_config(recipes[0], overrides, report=silent).train.target_top1 if target is None else target
    if target is None or not 0 < target <= 1:
        shown = (
            "no --target, and the first recipe has no train.target_top1" if target is None else f"--target {target:g}"
        )
        raise UserError(f"{shown}: expected a top-1 above 0 and at most 1; for example --target 0.759")
    design = design_of_recipes(recipes, overrides, target, seeds)
    command = shlex.join(["megabatch", "study", NAME, *given, "--target", f"{target:g}", "--seeds", f"{seeds}"])
    run_time_study(design, command, folder, out, jobs)


def run_time_study(design: "TimeDesign", command: str, folder: Path | None, out: Path, jobs: int | None) -> None:
    from megabatch.experiments.drawing import require_matplotlib
    from megabatch.experiments.time_to_accuracy import (
        TimeStudy,
        head,
        judge_time,
        study_so_far,
        summarize,
        trials_of,
        write_time_study,
    )
    from megabatch.experiments.trials import SweepScreen, Trial, choose_jobs, run_trials
    from megabatch.ranks.machine import cpu_name, usable_cores
    from megabatch.runs.records import Summary

    require_matplotlib()  # find all mistakes before hours of training
    trials, where = trials_of(design), folder or Path("runs") / f"study-{design.name}"
    jobs, done = choose_jobs(jobs or 1, "auto"), set[str]()
    machine = f"{len(usable_cores())} cores of {cpu_name()}, {plural(jobs, 'run')} at a time"

    def study() -> TimeStudy:
        return study_so_far(design, trials, where, done, {"command": command, "machine": machine})

    def keep(trial: Trial, summary: Summary) -> None:
        done.add(trial.name)
        write_time_study(study(), out)

    order = trials.in_turns()
    screen = SweepScreen(len(order), jobs)
    screen.row("runs", f"{len(order)} in {where}, {jobs} at a time; the same command resumes them")
    with exit_like_ranks():
        run_trials(order, where, jobs, screen, keep)
    found = study()
    for row in summarize(found):
        screen.row(row[0], "; ".join(f"{name} {value}" for name, value in zip(head(found)[1:], row[1:], strict=True)))
    for criterion in found.criteria:
        holds, text = judge_time(found, criterion)
        screen.row({True: "holds", False: "missed", None: "unclear"}[holds], text)
    for path in write_time_study(found, out):
        screen.row("written", str(path))


def list_studies() -> None:
    from rich.text import Text

    from megabatch.experiments.design import known_studies, read_any_design
    from megabatch.io.terminal import BOLD, Terminal

    console = Terminal()
    for design in map(read_any_design, known_studies()):
        console.print(Text.assemble((design.name, BOLD), f"  {design.num_trials} runs: {design.title}"))
    console.print(Text.assemble(("time-to-accuracy", BOLD), "  RECIPE...: the time that recipes need to reach a top-1"))
    console.print("\nmegabatch study STUDY runs one of these, or a study in a TOML file (docs/studies.md).")


def run_study(design: "Design", command: str, folder: Path | None, out: Path, jobs: int | None) -> None:
    from functools import partial

    from megabatch.experiments.batch_limit import answer_lines
    from megabatch.experiments.conduct import Conductor, End
    from megabatch.experiments.drawing import require_matplotlib
    from megabatch.experiments.page import write_study
    from megabatch.experiments.trials import SweepScreen, Trial, choose_jobs, run_trials
    from megabatch.experiments.verdict import judge, judge_published
    from megabatch.user_code import import_user_code

    require_matplotlib()  # find all mistakes before hours of training
    check_arms(design)
    probes = {curve: import_user_code(f"curves.{curve}", code) for curve, code in design.curves.items()}
    jobs = choose_jobs(jobs, "auto")
    before = read_before(design, out)
    folder = folder or Path("runs") / f"study-{design.name}"
    screen = SweepScreen(design.num_trials - (before.num_runs if before else 0), jobs)

    def run(trials: Sequence[Trial], on_end: End) -> None:
        run_trials(trials, folder, jobs, screen, on_end)

    conductor = Conductor(
        design, folder, command, run, probes, partial(write_study, folder=out), before, str(json_file(design, out))
    )
    screen.row("study", f"{design.name}: {design.title}")
    screen.row("runs", f"{design.num_trials} in {folder}, {jobs} at a time; the same command resumes them")
    screen.row("cost", cost_of(design))
    if before:
        screen.row("kept", f"{plural(before.num_runs, 'run')} from {json_file(design, out)}, not repeated")
    with exit_like_ranks():
        found = conductor.conduct()
    verdicts = [judge(found, criterion) for criterion in found.criteria]
    verdicts += [judge_published(arm) for arm in found.arms if arm.published is not None]
    for verdict in verdicts:
        screen.row({True: "holds", False: "missed", None: "unclear"}[verdict.holds], verdict.text)
    for line in answer_lines(found):
        screen.row("answer", line)
    for path in write_study(found, out):
        screen.row("written", str(path))


def cost_of(design: "Design") -> str:
    """Return the images that all runs train on, and the hours at the speed of the recipe's newest run here."""
    from megabatch.config.loading import load_config, silent
    from megabatch.config.resolve import plan_run
    from megabatch.data.catalog import infer_shape
    from megabatch.experiments.plan import SearchPoint, seed_trial
    from megabatch.runs.folder import numbered_runs
    from megabatch.runs.reader import read_summary

    images, speed, source = 0.0, 1000.0, "an assumed speed"
    for path in reversed(numbered_runs(load_config(design.recipe, report=silent).name)):
        summary = read_summary(path)
        if summary and summary.images_per_s:
            speed, source = summary.images_per_s, f"the speed of {path}"
            break
    for arm in design.arms:
        trial = seed_trial(design, arm, SearchPoint(1.0), seed=1)
        config = load_config(trial.recipe, trial.overrides, report=silent)
        plan = plan_run(config, infer_shape(config.data), num_ranks=1)
        searched = design.search.trials if design.search and arm.learning_rates else 0
        images += plan.num_steps * plan.global_batch * (searched + design.num_seeds(arm))
    hours = images / speed / 3600
    return f"{images / 1e6:,.1f} million images: {hours:,.1f} hours at {speed:,.0f} images/s in all, {source}"


def check_arms(design: "Design") -> None:
    from megabatch.config.loading import load_config, silent
    from megabatch.config.resolve import plan_run
    from megabatch.data.catalog import infer_shape
    from megabatch.experiments.plan import SearchPoint, search_trial, seed_trial

    for arm in design.arms:
        trials = [seed_trial(design, arm, SearchPoint(1.0), seed=1)]
        trials += [search_trial(design, arm, SearchPoint(1.0))] if arm.learning_rates else []
        for trial in trials:
            config = load_config(trial.recipe, trial.overrides, report=silent)
            plan_run(config, infer_shape(config.data), num_ranks=1)


def read_before(design: "Design", out: Path) -> "Study | None":
    """Return the results of an earlier command, if there are any."""
    from megabatch.experiments.page import load_study

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be created ({error.strerror}); give another folder") from None
    path = json_file(design, out)
    return load_study(path) if path.exists() else None


def json_file(design: "Design", out: Path) -> Path:
    return out / f"{design.name}.json"
