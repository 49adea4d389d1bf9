"""megabatch chaos: train a recipe while ranks, launchers, disks and links fail."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from megabatch.cli.overrides import MOST, Ranks, choose_ranks, require_folder_of, require_named_model, split_arguments
from megabatch.errors import UserError

DEFAULT = "smoke"
# Overrides of the smoke recipe: some seconds of steps, evaluations and checkpoints; 6 microbatches, for 2 or 3 ranks.
LONGER = (
    "batch.global=96",
    "batch.micro=16",
    "train.epochs=30",
    "data.synthetic.test=1000",
    "checkpoint.every_steps=20",
)
TIMEOUT = "comm.timeout_s=6"  # detects a stopped rank soon
# Between hosts, timings choose the algorithm.  A run killed before the choice is stored could choose another one,
# which rounds differently.
FIXED_ALGORITHM = "comm.algorithm=torus"


def chaos(
    given: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [section.key=value]...",
            help="A recipe name or a TOML file (default: smoke, lengthened), followed by overrides of settings.",
            show_default=False,
        ),
    ] = None,
    kills: Annotated[int, typer.Option(min=1, max=MOST, help="Faults to inject.")] = 50,
    seed: Annotated[int, typer.Option(min=0, max=MOST, help="Seed of the faults and their times.")] = 7,
    ranks: Ranks = None,
    hosts: Annotated[
        int, typer.Option(min=1, max=2, help="2: two network namespaces with torchrun; needs root and iproute2.")
    ] = 1,
    only: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help="Repeat only the disturbed run with this number.", show_default=False),
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Run scenarios on a small Slurm cluster; needs root, slurm-wlm and munge.")
    ] = False,
    mpi: Annotated[bool, typer.Option("--mpi", help="Run scenarios under Open MPI and MPICH, if installed.")] = False,
    case: Annotated[
        list[str] | None,
        typer.Option(help="With --slurm or --mpi: only this scenario; can be repeated.", show_default=False),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the full report to this file.")] = None,
) -> None:
    """Train a recipe while its processes, disk and network fail, and compare it bitwise with an undisturbed run.

    [bold]megabatch chaos[/bold] smoke --kills 50 --seed 7 --ranks 2

    The faults kill ranks and launchers at random times, stop ranks, fill the disk and sever links. The exit code is 0
    only if every run finished with the same weights and rows and left no processes or files.
    """
    from megabatch.config.loading import load_config, parse_setting
    from megabatch.data.catalog import FROM_PYTHON, load_data_set
    from megabatch.io.disk import write_file
    from megabatch.ranks.discover import discover
    from megabatch_lab.chaos.launchers import run_launchers
    from megabatch_lab.chaos.namespaces import require_tools
    from megabatch_lab.chaos.report import report_json
    from megabatch_lab.chaos.run import ChaosRequest, run_chaos
    from megabatch_lab.chaos.screen import ChaosScreen

    require_folder_of(json)
    info = discover()
    if info:
        raise UserError(
            f"this is rank {info.rank} of {info.num_ranks}, but chaos starts ranks itself; "
            "run it without torchrun, srun or mpiexec"
        )
    recipe, overrides = split_arguments(given, DEFAULT)
    if any(parse_setting(override).key == "run.dir" for override in overrides):
        raise UserError("run.dir cannot be given to chaos, which trains in temporary folders; leave it out")
    if case and not (slurm or mpi):
        raise UserError(f"--case {case[0]} is a scenario of a launcher; add --slurm or --mpi")
    has_fixed = hosts > 1 or slurm
    before = [*(LONGER if recipe == DEFAULT else ()), TIMEOUT, *([FIXED_ALGORITHM] if has_fixed else [])]
    config = load_config(recipe, [*before, *overrides])
    require_named_model(config, recipe, overrides)
    if config.data.source.startswith(FROM_PYTHON):
        raise UserError(f"{recipe} needs the model and images of the Python program that wrote it; give another recipe")
    load_data_set(config.data)  # reports an invalid source before ranks start
    if slurm or mpi:
        report = run_launchers(config.with_run(dir=None).to_toml(), slurm, mpi, case or [])
        if json:
            write_file(json, msgspec.json.encode(report).decode())
        if not report.holds:
            raise typer.Exit(1)
        return
    if hosts > 1:
        require_tools()
    num_ranks = choose_ranks(config, hosts if ranks is None and hosts > 1 else ranks)
    if num_ranks % hosts:
        raise UserError(
            f"--ranks {num_ranks} cannot be divided among --hosts {hosts}; nearest: --ranks {num_ranks + 1}"
        )
    request = ChaosRequest(
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
    disturbed = run_chaos(request, screen)
    screen.finish(disturbed)
    if json:
        write_file(json, report_json(disturbed))
    if not disturbed.holds:
        raise typer.Exit(1)
