"""megabatch simulate: the predicted time and cost of a training on any cluster."""

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from megabatch.cli.overrides import ProfileOption, load_recipe
from megabatch.errors import UserError, nearest, require_one_of

if TYPE_CHECKING:
    from megabatch.simulate.cluster import Cluster
    from megabatch.simulate.job import Job
    from megabatch.simulate.profile import Profile
    from megabatch.simulate.whatif import Search, Variant
    from megabatch.simulate.workload import Workload

IMAGE_SIZE = 224  # of a model without a recipe
EXAMPLE = "for example: megabatch simulate resnet50-imagenet-64k --cluster p40-roce100 --ranks 8..2048"


class RequestedJob(NamedTuple):
    """A job, with notes to print above its table."""

    job: "Job"
    recipe_batch: int | None  # None without a recipe
    notes: list[str]


def simulate(
    given: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE|MODEL [section.key=value]...",
            help="A recipe name, a TOML file or a model, followed by overrides of the recipe and the cluster.",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="A preset, a TOML or JSON file, or this (measured by megabatch plan).",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(metavar="N,N|N..N", help="Numbers of ranks: 8,64,512, or doubling: 8..2048.")
    ] = None,
    batch_per_rank: Annotated[int | None, typer.Option(help="Images per rank and step.", show_default=False)] = None,
    comm_dtype: Annotated[
        str | None, typer.Option(metavar="same|bf16|fp16", help="Comm dtype between nodes; same does not round.")
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="auto, flat, hierarchical or torus; or the backend's ring, tree or in_network."
        ),
    ] = None,
    overlap: Annotated[
        str, typer.Option(metavar="auto|none|layer|fused", help="Overlap of all-reduces with backward.")
    ] = "auto",
    compare: Annotated[bool, typer.Option("--compare", help="Compare all algorithms.")] = False,
    sweep: Annotated[
        str | None, typer.Option(metavar="KEY=V,V", help="Vary a number of the cluster: network.gbps=10,25,100,400.")
    ] = None,
    ladder: Annotated[
        bool,
        typer.Option(
            "--ladder", help="Add the improvements of Jia et al. one by one, starting from a ring per tensor."
        ),
    ] = False,
    within: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Find the smallest cluster that finishes within this time: 10min, 600s or 2h."
        ),
    ] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="auto", help="Choose the best global batch for each number of ranks.")
    ] = None,
    goal: Annotated[
        str | None,
        typer.Option(
            metavar="time|cost", help="Aim of --batch auto, which it implies. Default: cost with --within, else time."
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="USD", help="Find the fastest run for at most 100usd; implies --batch auto.")
    ] = None,
    curve: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|FILE.json",
            help="Run that reached its target, or batch-limit study; implies --batch auto. Default: MLPerf's points.",
        ),
    ] = None,
    profile: ProfileOption = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write all rows to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw images/s against ranks.")
    ] = None,
) -> None:
    """Predict time, cost and the best all-reduce for training on a cluster, even one that you do not have.

    [bold]megabatch simulate[/bold] resnet50-imagenet-64k --cluster p40-roce100 --ranks 8..2048

    It uses the same plans, cost model and buckets as training.
    A model without a recipe (resnet50) runs in the cluster's 16-bit dtype.

    With train.epochs=90, it trains for 90 epochs of ImageNet.
    """
    from megabatch.cli.simulate_output import draw, encode, require_output, write
    from megabatch.cli.simulate_screen import print_ladder, print_report, print_variants
    from megabatch.simulate import whatif
    from megabatch.simulate.best_batch import Limits
    from megabatch.simulate.job import notes, require_batch
    from megabatch.simulate.load import load_cluster, preset_names
    from megabatch.simulate.profile import read_profile
    from megabatch.simulate.request import parse_budget, parse_ranks, parse_sweep, parse_within, split_overrides
    from megabatch.simulate.whatif import smallest_within

    subject, overrides = split_subject(given)
    if batch is None and (goal, budget, curve) != (None, None, None):
        batch = "auto"
    require_one_question(compare=compare, sweep=sweep, ladder=ladder, within=within)
    require_batch_options(batch, goal, compare or ladder or sweep is not None, batch_per_rank)
    require_choices(comm_dtype, algorithm, overlap, compare, ladder)
    require_batch(batch_per_rank)
    require_output(json, plot)
    of_cluster, of_job = split_overrides(overrides)
    if cluster is None:
        raise UserError(f"--cluster is missing; use {', '.join(preset_names())}, this, or a .toml file; {EXAMPLE}")
    if ranks is None and within is None and budget is None:
        raise UserError(f"--ranks is missing; {EXAMPLE}")
    counts = parse_ranks(ranks) if ranks is not None else []
    limit_s = parse_within(within) if within is not None else None
    swept = parse_sweep(sweep) if sweep is not None else None
    target = load_cluster(cluster, of_cluster)
    recorded = read_profile(profile) if profile else None
    job, recipe_batch, remarks = make_job(
        subject, of_job, target, recorded, batch_per_rank, comm_dtype, algorithm, overlap
    )

    if batch is not None:
        from megabatch.cli.simulate_batch import Question, answer  # imports torch

        limits = Limits(limit_s, parse_budget(budget) if budget is not None else None)
        # In time, cheapest; within the budget, fastest.
        cheapest = goal == "cost" or (goal is None and within is not None)
        question = Question("cost" if cheapest else "time", limits, within or "", budget or "")
        answer(job, target, counts, question, curve, remarks, json, plot)
        return
    search: Search | None = None
    if limit_s is not None:
        if not job.has_length:
            raise UserError(
                f"--within {within}: a model without a recipe has no length; add, for example, train.epochs=90"
            )
        search = smallest_within(job, target, limit_s)
        counts = counts or [(search.found or search.fastest).scenario.num_ranks]
    if ladder:
        remarks.append(describe_ladder(job, target))
    swept_clusters = {}
    if swept:
        swept_clusters = {
            (swept.key, value): load_cluster(cluster, [*of_cluster, f"{swept.key}={value}"]) for value in swept.values
        }
    variants = vary(job, target, counts, compare, ladder, swept_clusters)
    results = [] if variants else whatif.run_all(job, target, counts)
    remarks += notes(job, counts, recipe_batch, comm_dtype)

    if json:
        write(json, "--json", encode(job, target, counts, results, variants, search))
    if plot:
        write(plot, "--plot", draw(job, target, results, variants))
    if ladder:
        print_ladder(job, target, variants, counts, remarks)
    elif variants:
        print_variants(job, target, variants, counts, remarks)
    else:
        print_report(job, target, results, remarks, search, within or "")


def vary(
    job: "Job",
    cluster: "Cluster",
    counts: Sequence[int],
    compare: bool,
    ladder: bool,
    swept: "Mapping[tuple[str, float], Cluster]",  # by key and value
) -> "list[Variant]":
    """Simulate the variants of --compare, --ladder or --sweep."""
    from megabatch.simulate import whatif

    if compare:
        return whatif.compare(job, cluster, counts)
    if ladder:
        return whatif.ladder(job, cluster, counts)
    return [
        whatif.Variant(f"{key}={value}", {key: float(value)}, whatif.run_all(job, each, counts))
        for (key, value), each in swept.items()
    ]


def describe_ladder(job: "Job", cluster: "Cluster") -> str:
    from megabatch.simulate.compute import GRADIENTS
    from megabatch.simulate.whatif import ladder_precisions

    wide, narrow = ladder_precisions(job, cluster)
    last = f"gradients are {GRADIENTS[narrow]}" if narrow != wide else "gradients are sent in 16 bits"
    return f"--ladder computes in {wide} with gradients in {GRADIENTS[wide]}; in the last line {last}"


def split_subject(given: Sequence[str] | None) -> tuple[str, list[str]]:
    given = list(given or [])
    if not given or "=" in given[0]:
        raise UserError(f"a recipe or a model is missing; {EXAMPLE}")
    return given[0], given[1:]


def require_one_question(**asked: object) -> None:
    given = [f"--{name}" for name, value in asked.items() if value not in (None, False)]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} cannot be combined; use one of them")


def require_batch_options(
    batch: str | None,
    goal: str | None,
    has_other_question: bool,
    batch_per_rank: int | None,
) -> None:
    if batch is None:
        return
    if batch != "auto":
        raise UserError(f"--batch {batch}: expected auto; a fixed batch is an override, for example batch.global=8192")
    if goal is not None:
        require_one_of("--goal", goal, ["time", "cost"])
    if has_other_question or batch_per_rank is not None:
        raise UserError("--batch auto chooses the batch; remove --compare, --ladder, --sweep and --batch-per-rank")


def require_choices(comm_dtype: str | None, algorithm: str | None, overlap: str, compare: bool, ladder: bool) -> None:
    from megabatch.planning.algorithms import ALGORITHMS
    from megabatch.planning.plan import BACKEND_ALGORITHMS, COMM_DTYPES
    from megabatch.simulate.step import OVERLAPS

    require_one_of("--overlap", overlap, OVERLAPS)
    if comm_dtype is not None:
        require_one_of("--comm-dtype", comm_dtype, COMM_DTYPES)
    if algorithm is not None:
        require_one_of("--algorithm", algorithm, ["auto", *ALGORITHMS, *BACKEND_ALGORITHMS])
    if compare and algorithm is not None:
        raise UserError(
            f"--compare tries all algorithms, so --algorithm {algorithm} cannot be added; remove one of them"
        )
    fixed = {"--comm-dtype": comm_dtype, "--algorithm": algorithm, "--overlap": None if overlap == "auto" else overlap}
    for option, value in fixed.items():
        if ladder and value is not None:
            raise UserError(f"--ladder chooses the dtype, algorithm and overlap itself; remove {option} {value}")


def make_job(
    subject: str,
    overrides: Sequence[str],
    cluster: "Cluster",
    profile: "Profile | None",
    batch_per_rank: int | None,
    comm_dtype: str | None,
    algorithm: str | None,
    overlap: str,
) -> RequestedJob:
    """Return the job. Stored models need no torch, which takes seconds to import."""
    from msgspec.structs import replace

    from megabatch.data.sources.shapes import IMAGENET
    from megabatch.simulate.job import job_of_model, with_batch_per_rank, with_profile
    from megabatch.simulate.request import parse_model_settings
    from megabatch.simulate.step import AllReduceSettings
    from megabatch.simulate.workload import STORED, load_workload

    changed: dict[str, Any] = {"dtype": comm_dtype, "algorithm": algorithm, "overlap": overlap}
    changed = {name: value for name, value in changed.items() if value is not None}
    if is_recipe(subject):
        job, remarks = read_recipe(subject, overrides)
        recipe_batch = job.global_batch
        if batch_per_rank is not None:
            job = with_batch_per_rank(job, batch_per_rank)
        if profile:
            job = with_profile(job, profile)
        return RequestedJob(replace(job, all_reduce=job.all_reduce._replace(**changed)), recipe_batch, remarks)
    settings = parse_model_settings(overrides)
    workload = load_workload(subject) if subject in STORED else count_model(subject)
    images = IMAGENET.num_train, IMAGENET.num_test
    job = job_of_model(workload, cluster, settings, AllReduceSettings(**changed), batch_per_rank, *images, profile)
    return RequestedJob(job, None, [])


def is_recipe(subject: str) -> bool:
    """Return whether `subject` is a recipe's name, a TOML file or a run's folder, and not a model."""
    from megabatch.runs.reader import is_run
    from megabatch.simulate.workload import STORED

    stored = resources.files("megabatch.recipes") / f"{subject}.toml"
    return stored.is_file() or Path(subject).suffix == ".toml" or (subject not in STORED and is_run(Path(subject)))


def read_recipe(recipe: str, overrides: Sequence[str]) -> "tuple[Job, list[str]]":
    from megabatch.preflight.preview import job_of_recipe

    config = load_recipe([recipe, *overrides], needs_source=False)
    job, has_images = job_of_recipe(config)
    source = f"data.source={config.data.source!r} does not exist" if config.data.source else "data.source is not set"
    return job, [] if has_images else [f"{source}; the images and classes of ImageNet are assumed"]


def count_model(name: str) -> "Workload":
    """Count the work of a model that is not stored."""
    from megabatch.config.recipes import recipe_names
    from megabatch.data.sources.shapes import IMAGENET
    from megabatch.models.catalog import MODELS, ModelSettings
    from megabatch.preflight.count import count_workload

    if name not in MODELS and ":" not in name:
        known = [*recipe_names(), *MODELS]
        raise UserError(
            f"{name!r} is neither a recipe (megabatch recipes) nor a model ({', '.join(MODELS)}); "
            f"nearest: {nearest(name, known)}"
        )
    return count_workload(ModelSettings(name=name), IMAGE_SIZE, IMAGENET.num_classes)
