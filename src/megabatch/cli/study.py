"""megabatch study: claims about accuracy, put to the test at a size that a desktop can repeat."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabatch.cli.ranks import speaking_for_ranks
from megabatch.errors import UserError

if TYPE_CHECKING:
    from megabatch.studies.design import Design

app = typer.Typer(
    help="Find out on a desktop whether huge batches and 16 bits lose accuracy; takes hours, and resumes when stopped.",
    no_args_is_help=True,
)
Folder = Annotated[
    Path | None,
    typer.Option(help="Where the runs are kept, and resume.  Default: runs/study-<name>.", show_default=False),
]
Out = Annotated[Path, typer.Option(help="Where the page, its figures and its JSON go.")]
Jobs = Annotated[int | None, typer.Option(help="Runs at a time, of one rank each.  Default: one per core.")]


@app.command("large-batch")
def large_batch(folder: Folder = None, out: Out = Path("docs/studies"), jobs: Jobs = None) -> None:
    """Batches of 128, 3,072 and 8,192, Nesterov and LARS, equal epochs: 71 runs on full Fashion-MNIST."""
    from megabatch.studies.studies import LARGE_BATCH

    run_study(LARGE_BATCH, folder, out, jobs)


@app.command("large-batch-90")
def large_batch_90(folder: Folder = None, out: Out = Path("docs/studies"), jobs: Jobs = None) -> None:
    """The paper's steps: 90 epochs of 19.5, a residual network: 66 runs on 20,000 images of Fashion-MNIST."""
    from megabatch.studies.large_batch_90 import LARGE_BATCH_90

    run_study(LARGE_BATCH_90, folder, out, jobs)


@app.command()
def ablation(folder: Folder = None, out: Out = Path("docs/studies"), jobs: Jobs = None) -> None:
    """A small AlexNet-BN with and without BatchNorm behind pool5, and with decay on everything: 27 runs."""
    from megabatch.studies.studies import ABLATION

    run_study(ABLATION, folder, out, jobs)


@app.command()
def precision(folder: Folder = None, out: Out = Path("docs/studies"), jobs: Jobs = None) -> None:
    """fp32, fp16, bf16, and LARS in fp16: 33 runs."""
    from megabatch.studies.studies import PRECISION

    run_study(PRECISION, folder, out, jobs)


def run_study(design: "Design", folder: Path | None, out: Path, jobs: int | None) -> None:
    from functools import partial

    from megabatch.config.loading import load_config, silent
    from megabatch.config.resolve import plan_run
    from megabatch.data.sources import infer_shape
    from megabatch.studies.conduct import conduct, search_trial
    from megabatch.studies.drawing import require_matplotlib
    from megabatch.studies.page import write_study
    from megabatch.studies.points import Point
    from megabatch.studies.variance import layer_variance
    from megabatch.studies.verdict import judge
    from megabatch.sweep.screen import SweepScreen
    from megabatch.sweep.trials import choose_jobs, run_trials

    require_matplotlib()  # all that can be wrong is found before the hours that it takes
    for arm in design.arms:
        config = load_config(design.recipe, search_trial(design, arm, Point(1.0)).overrides, report=silent)
        plan_run(config, infer_shape(config.data), num_ranks=1)
    jobs = choose_jobs(jobs, "auto")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be used ({error.strerror}); give another folder") from None
    folder = folder or Path("runs") / f"study-{design.name}"
    screen = SweepScreen(design.num_trials, jobs)
    screen.say("study", f"{design.name}: {design.title}")
    screen.say("runs", f"{design.num_trials} in {folder}, {jobs} at a time; stopped, the same command resumes")
    command = shlex.join(["megabatch", *sys.argv[1:]])
    with speaking_for_ranks():
        run = partial(run_trials, folder=folder, jobs=jobs, screen=screen)
        study = conduct(design, folder, command, run, layer_variance)
    for criterion in study.criteria:
        verdict = judge(study, criterion)
        screen.say({True: "holds", False: "missed", None: "untold"}[verdict.holds], verdict.text)
    for path in write_study(study, out):
        screen.say("written", str(path))
