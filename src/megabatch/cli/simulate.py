"""megabatch simulate: how long a training takes on a cluster that one does not have yet."""

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from megabatch.cli.overrides import ProfileOption
from megabatch.errors import UserError, nearest, require_one_of

if TYPE_CHECKING:
    from megabatch.simulate.cluster import Cluster
    from megabatch.simulate.job import Job
    from megabatch.simulate.profile import Profile
    from megabatch.simulate.whatif import Search, Variant
    from megabatch.simulate.workload import Workload

IMAGE_SIZE = 224  # of a model that has no recipe
EXAMPLE = "for example: megabatch simulate resnet50-imagenet-64k --cluster p40-roce100 --ranks 8..2048"


class RequestedJob(NamedTuple):
    """A job, and what is to be said beside its table."""

    job: "Job"
    recipe_batch: int | None  # of a recipe
    notes: list[str]


def simulate(
    given: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE|MODEL [section.key=value]...",
            help="A recipe's name or TOML file, or a model; then settings of the recipe and of the cluster.",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="A preset, or a TOML file like them.", show_default=False)
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(metavar="N,N|N..N", help="Rank counts: 8,64,512, or doublings: 8..2048.")
    ] = None,
    batch_per_rank: Annotated[int | None, typer.Option(help="Images of a rank in a step.", show_default=False)] = None,
    wire: Annotated[
        str | None, typer.Option(metavar="fp32|bf16|fp16", help="What travels.  fp32: gradients as they are.")
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="auto, flat, hierarchical, torus; of the engine: ring, tree, in_network."),
    ] = None,
    overlap: Annotated[
        str, typer.Option(metavar="auto|none|layer|fused", help="Of all-reduces and backward.")
    ] = "auto",
    compare: Annotated[bool, typer.Option("--compare", help="Every algorithm in turn.")] = False,
    sweep: Annotated[
        str | None, typer.Option(metavar="KEY=V,V", help="A number of the cluster in turn: network.gbps=10,25,100,400.")
    ] = None,
    ladder: Annotated[
        bool, typer.Option("--ladder", help="Jia et al.'s improvements one by one, from a ring for every tensor.")
    ] = False,
    within: Annotated[
        str | None, typer.Option(metavar="TIME", help="The smallest cluster that finishes in 10min, 600s or 2h.")
    ] = None,
    profile: ProfileOption = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write all rows to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw images/s against ranks.")
    ] = None,
) -> None:
    """Predict time, cost and the best all-reduce of a training on a cluster that need not exist.

    [bold]megabatch simulate[/bold] resnet50-imagenet-64k --cluster p40-roce100 --ranks 8..2048

    It reads the same plans, prices and buckets as training does.
    A model alone (resnet50) runs in the cluster's 16 bits; train.epochs=90 then gives it an end on ImageNet.
    """
    from megabatch.cli.simulate_output import draw, encode, require_output, write
    from megabatch.cli.simulate_screen import print_ladder, print_report, print_variants
    from megabatch.simulate import whatif
    from megabatch.simulate.job import notes, require_batch
    from megabatch.simulate.load import load_cluster, preset_names
    from megabatch.simulate.profile import read_profile
    from megabatch.simulate.request import parse_ranks, parse_sweep, parse_within, split_overrides
    from megabatch.simulate.whatif import smallest_within

    subject, overrides = split_subject(given)
    require_one_question(compare=compare, sweep=sweep, ladder=ladder, within=within)
    require_choices(wire, algorithm, overlap, compare, ladder)
    require_batch(batch_per_rank)
    require_output(json, plot)
    of_cluster, of_job = split_overrides(overrides)
    if cluster is None:
        raise UserError(f"--cluster is not given; one of {', '.join(preset_names())}, this, or a .toml file; {EXAMPLE}")
    if ranks is None and within is None:
        raise UserError(f"--ranks is not given; {EXAMPLE}")
    counts = parse_ranks(ranks) if ranks is not None else []
    limit_s = parse_within(within) if within is not None else None
    swept = parse_sweep(sweep) if sweep is not None else None
    target = load_cluster(cluster, of_cluster)
    recorded = read_profile(profile) if profile else None
    job, recipe_batch, remarks = make_job(subject, of_job, target, recorded, batch_per_rank, wire, algorithm, overlap)

    search: Search | None = None
    if limit_s is not None:
        if not job.has_length:
            raise UserError(f"--within {within}: {job.name} alone has no end; for example train.epochs=90")
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
    remarks += notes(job, counts, recipe_batch, wire)

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
    """The same job in other ways, if that was asked."""
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
    last = f"they are {GRADIENTS[narrow]}" if narrow != wide else "16 bits travel"
    return f"--ladder computes in {wide}, with gradients in {GRADIENTS[wide]}; in its last line {last}"


def split_subject(given: Sequence[str] | None) -> tuple[str, list[str]]:
    given = list(given or [])
    if not given or "=" in given[0]:
        raise UserError(f"no recipe and no model is given; {EXAMPLE}")
    return given[0], given[1:]


def require_one_question(**asked: object) -> None:
    given = [f"--{name}" for name, value in asked.items() if value not in (None, False)]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} are different questions; ask one at a time")


def require_choices(wire: str | None, algorithm: str | None, overlap: str, compare: bool, ladder: bool) -> None:
    from megabatch.planning.algorithms import ALGORITHMS
    from megabatch.planning.plan import COMM_DTYPES
    from megabatch.simulate.step import ENGINE_ALGORITHMS, OVERLAPS

    require_one_of("--overlap", overlap, OVERLAPS)
    if wire is not None:
        require_one_of("--wire", wire, COMM_DTYPES)
    if algorithm is not None:
        require_one_of("--algorithm", algorithm, ["auto", *ALGORITHMS, *ENGINE_ALGORITHMS])
    if compare and algorithm is not None:
        raise UserError(f"--compare tries every algorithm, and --algorithm {algorithm} is one; leave one of them out")
    fixed = {"--wire": wire, "--algorithm": algorithm, "--overlap": None if overlap == "auto" else overlap}
    for option, value in fixed.items():
        if ladder and value is not None:
            raise UserError(f"--ladder varies what travels and how, so {option} {value} has no place; leave it out")


def make_job(
    subject: str,
    overrides: Sequence[str],
    cluster: "Cluster",
    profile: "Profile | None",
    batch_per_rank: int | None,
    wire: str | None,
    algorithm: str | None,
    overlap: str,
) -> RequestedJob:
    """What is stored is simulated without torch, which takes seconds to import."""
    from msgspec.structs import replace

    from megabatch.data.sources.shapes import IMAGENET
    from megabatch.simulate.job import job_of_model, with_batch_per_rank, with_profile
    from megabatch.simulate.request import parse_model_settings
    from megabatch.simulate.step import AllReduceSettings
    from megabatch.simulate.workload import STORED, load_workload

    changed: dict[str, Any] = {"dtype": wire, "algorithm": algorithm, "overlap": overlap}
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
    """A name, a TOML file or the folder of a run; else it is a model."""
    from megabatch.runs.reader import is_run
    from megabatch.simulate.workload import STORED

    stored = resources.files("megabatch.recipes") / f"{subject}.toml"
    return stored.is_file() or Path(subject).suffix == ".toml" or (subject not in STORED and is_run(Path(subject)))


def read_recipe(recipe: str, overrides: Sequence[str]) -> "tuple[Job, list[str]]":
    from megabatch.cli.overrides import require_named_model, split_arguments_or_run
    from megabatch.config.loading import load_config
    from megabatch.preflight.preview import job_of_recipe

    recipe, overrides = split_arguments_or_run([recipe, *overrides])
    config = load_config(recipe, overrides, needs_source=False)
    require_named_model(config, recipe, overrides)
    job, has_images = job_of_recipe(config)
    source = f"data.source={config.data.source!r} is not there" if config.data.source else "data.source is not set"
    return job, [] if has_images else [f"{source}: as many images and classes as ImageNet has are assumed"]


def count_model(name: str) -> "Workload":
    """As the stored ones are counted."""
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
