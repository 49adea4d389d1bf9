"""megabatch chaos: a recipe trained while ranks, launchers, disks and links fail."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from megabatch.cli.overrides import MOST, Ranks, choose_ranks, require_folder_of, require_named_model, split_arguments
from megabatch.errors import UserError

DEFAULT = "smoke"
# Of the smoke recipe: seconds of steps, with evaluations and checkpoints; 6 microbatches, for 2 and 3 ranks.
LONGER = (
    "batch.global=96",
    "batch.micro=16",
    "train.epochs=30",
    "data.synthetic.test=1000",
    "checkpoint.every_steps=20",
)
TIMEOUT = "comm.timeout_s=6"  # a rank that is stopped is to be noticed soon
# Between hosts the choice is timed: a run that is killed before it is stored would choose again, and round otherwise.
PINNED = "comm.algorithm=torus"


def chaos(
    given: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [section.key=value]...",
            help="A recipe's name or TOML file (default: smoke, lengthened), then settings that override it.",
            show_default=False,
        ),
    ] = None,
    kills: Annotated[int, typer.Option(min=1, max=MOST, help="Faults to inject.")] = 50,
    seed: Annotated[int, typer.Option(min=0, max=MOST, help="Decides which faults come when.")] = 7,
    ranks: Ranks = None,
    hosts: Annotated[
        int, typer.Option(min=1, max=2, help="2: on two network namespaces, with torchrun; needs root and iproute2.")
    ] = 1,
    only: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help="Repeat the disturbed run of this number alone.", show_default=False),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write all that was found to this file.")] = None,
) -> None:
    """Train a recipe while its processes, disk and network fail, and compare with an undisturbed run, to the bit.

    [bold]megabatch chaos[/bold] smoke --kills 50 --seed 7 --ranks 2

    Kills ranks and launchers at moments drawn over the whole run, stops ranks, fills the disk, severs links. Ends with
    exit code 0 only if every run came to its end with the same weights and rows, and nothing was left behind.
    """
    from megabatch.config.loading import load_config, parse_override
    from megabatch.data.catalog import FROM_PYTHON, load_data_set
    from megabatch.io.disk import write_file
    from megabatch.ranks.discover import discover
    from megabatch_lab.chaos.namespaces import require_tools
    from megabatch_lab.chaos.report import report_json
    from megabatch_lab.chaos.run import Request, run_chaos
    from megabatch_lab.chaos.screen import ChaosScreen

    require_folder_of(json)
    info = discover()
    if info:
        raise UserError(
            f"this is rank {info.rank} of {info.num_ranks}, and chaos starts its own; "
            "start it without torchrun, srun or mpiexec"
        )
    recipe, overrides = split_arguments(given, DEFAULT)
    if any(parse_override(override).key == "run.dir" for override in overrides):
        raise UserError("run.dir cannot be given to chaos, which trains in folders of its own; leave it out")
    before = [*(LONGER if recipe == DEFAULT else ()), TIMEOUT, *([PINNED] if hosts > 1 else [])]
    config = load_config(recipe, [*before, *overrides])
    require_named_model(config, recipe, overrides)
    if config.data.source.startswith(FROM_PYTHON):
        raise UserError(f"{recipe} is of a run from Python, where its model and images are; give another")
    load_data_set(config.data)  # reports a wrong source before ranks start
    if hosts > 1:
        require_tools()
    num_ranks = choose_ranks(config, hosts if ranks is None and hosts > 1 else ranks)
    if num_ranks % hosts:
        raise UserError(
            f"--ranks {num_ranks} does not share out among --hosts {hosts}; nearest: --ranks {num_ranks + 1}"
        )
    request = Request(
        command=shlex.join(["megabatch", *sys.argv[1:]]),
        recipe=config.with_run(dir=None).to_toml(),
        timeout_s=config.comm.timeout_s,
        kills=kills,
        seed=seed,
        num_ranks=num_ranks,
        num_hosts=hosts,
        only=only,
    )
    words = [recipe, *overrides, "--seed", str(seed), "--ranks", str(num_ranks), *["--hosts=2"] * (hosts > 1)]
    screen = ChaosScreen(["megabatch", "chaos", *words], request)
    report = run_chaos(request, screen)
    screen.finish(report)
    if json:
        write_file(json, report_json(report))
    if not report.holds:
        raise typer.Exit(1)
