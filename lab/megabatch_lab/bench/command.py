"""megabatch bench: every claim, measured beside its peer in the same run."""

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from megabatch.cli.overrides import MOST, require_folder_of
from megabatch.errors import UserError, require_one_of
from megabatch.ranks.lifecycle import be_a_rank, speaking_for_ranks, start_ranks

app = typer.Typer(help="Measure megabatch beside its peers, in the same run.", no_args_is_help=True)

Json = Annotated[Path | None, typer.Option("--json", help="Write command, machine and rows to this file.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Models = Annotated[list[str] | None, typer.Option("--model", help="A model; repeat for several.")]


@app.callback()
def benches() -> None:
    """Measure megabatch beside its peers, in the same run."""


@app.command()
def train(
    json: Json = None,
    ranks: Annotated[int, typer.Option(min=1, max=MOST, help="Ranks on this machine.")] = 2,
    rounds: Annotated[int, typer.Option(min=3, max=MOST, help="Blocks of steps for each arm; the median counts.")] = 81,
    device: Device = "auto",
    models: Models = None,
) -> None:
    """Our trainer against stock DistributedDataParallel, in images per second."""
    from megabatch.ranks.discover import discover

    bench = load_bench("train")
    require_folder_of(json)
    chosen = models or list(bench.WORKLOADS)
    for model in chosen:
        require_one_of("--model", model, bench.WORKLOADS)
    info = discover()
    if info:
        be_a_rank(info, lambda store: bench.run_rank(store.info, store, device, rounds, chosen, json))
    else:
        start_ranks(sys.argv[1:], ranks)


@app.command()
def allreduce(
    json: Json = None,
    ranks: Annotated[int, typer.Option(min=1, max=MOST, help="Ranks on this machine.")] = 2,
    rounds: Annotated[
        int, typer.Option(min=9, max=MOST, help="Turns of each arm; the median of all its calls counts.")
    ] = 25,
    sizes: Annotated[
        list[int] | None, typer.Option("--bytes", min=1, max=1 << 40, help="A size; repeat for several.")
    ] = None,
) -> None:
    """The all-reduce in a host's shared memory against Gloo's and MPICH's."""
    from megabatch.ranks.discover import discover

    bench = load_bench("allreduce")
    require_folder_of(json)
    info = discover()
    if info:
        be_a_rank(info, lambda store: bench.run_rank(store.info, store, rounds, sizes or bench.SIZES, json))
    elif bench.has_mpi(ranks):
        bench.become_mpiexec(sys.argv[1:], ranks)
    else:
        start_ranks(sys.argv[1:], ranks)


@app.command()
def cluster(
    json: Json = None,
    hosts: Annotated[int, typer.Option(help="Hosts, 2 to 4: network namespaces of this machine.")] = 2,
    ranks_per_host: Annotated[
        str | None, typer.Option(help="Set-ups to try.  2,4: so many on every host; 2+1: on each its own number.")
    ] = None,
    gbps: Annotated[str | None, typer.Option(help="Rates of the hosts' network cards to try: 1,2.5.")] = None,
    wire: Annotated[str | None, typer.Option(help="What travels between hosts: some of fp32,bf16,fp16.")] = None,
    models: Models = None,
    rounds: Annotated[int, typer.Option(min=9, max=MOST, help="Turns of each arm; the median counts.")] = 9,
    compare: Annotated[bool, typer.Option("--compare", help="Force each algorithm in turn, too.")] = False,
    train: Annotated[bool, typer.Option("--train", help="Instead, train AlexNet-BN beside stock DDP.")] = False,
) -> None:
    """All-reduces of a model's gradients among hosts, against Gloo's as DDP calls it.  Needs root and iproute2."""
    bench, setups = load_bench("cluster"), load_bench("setups")
    require_folder_of(json)
    request = setups.read_request(hosts, ranks_per_host, gbps, wire, models, compare, train)
    with speaking_for_ranks():
        bench.run(request, rounds, json)


@app.command()
def planning(
    json: Json = None,
    rounds: Annotated[int, typer.Option(min=1, max=MOST, help="Choices for each cluster; the median counts.")] = 5,
) -> None:
    """How long the choice of buckets and plans takes for 2,048 ranks, and for 16,384."""
    bench = load_bench("planning")
    require_folder_of(json)
    bench.run(rounds, json)


@app.command()
def startup(
    json: Json = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks to try, of which 8 make a node.")] = "8,256,2048",
    rounds: Annotated[int, typer.Option(min=1, max=MOST, help="Starts for each number; the median counts.")] = 3,
) -> None:
    """What one of thousands of ranks does until its first step, and in a step: rehearsed without the others."""
    bench = load_bench("startup")
    require_folder_of(json)
    bench.run(bench.read_numbers(ranks), rounds, json)


@app.command()
def soak(
    json: Json = None,
    steps: Annotated[int, typer.Option(min=1000, max=MOST, help="Steps of the run.")] = 20_000,
    ranks: Annotated[int, typer.Option(min=1, max=MOST, help="Ranks on this machine.")] = 2,
) -> None:
    """Whether a long run stays as it was: memory, threads, files and speed.  Exit code 1 if not."""
    bench = load_bench("soak")
    require_folder_of(json)
    if not bench.run(steps, ranks, json):
        raise typer.Exit(1)


@app.command()
def merging(
    json: Json = None,
    presets: Annotated[list[str] | None, typer.Option("--cluster", help="A preset; repeat for several.")] = None,
) -> None:
    """What a plan for each bucket gains over one plan and one threshold, simulated on the presets."""
    bench = load_bench("merging")
    require_folder_of(json)
    bench.run(json, presets)


@app.command()
def simulator(
    json: Json = None,
    parts: Annotated[
        list[str] | None,
        typer.Option("--part", help="here, published, paper or guide; repeat for several. Default: all."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw predicted against measured to this SVG file.")] = None,
    docs: Annotated[Path | None, typer.Option(help="Write the tables into this page.")] = None,
    rounds: Annotated[
        int, typer.Option(min=3, max=MOST, help="Turns of each arm on this machine; the median counts.")
    ] = 5,
) -> None:
    """What the simulator predicts beside what was measured: on this machine, on published clusters, in the paper."""
    bench = load_bench("simulator")
    require_folder_of(json)
    require_folder_of(plot, "--plot")
    if docs and not docs.is_file():
        raise UserError(f"--docs {docs} is no page with places for the tables; for example --docs docs/scaling.md")
    for part in parts or ():
        require_one_of("--part", part, bench.PARTS)
    with speaking_for_ranks():
        bench.run(parts or bench.default_parts(), rounds, json, plot, docs)


@app.command()
def optimizer(
    json: Json = None,
    rounds: Annotated[int, typer.Option(min=3, max=MOST, help="Steps of each arm; the median counts.")] = 31,
    models: Models = None,
) -> None:
    """A step of LARS against its peers' and against fused SGD, on one core and on all."""
    bench = load_bench("optimizer")
    require_folder_of(json)
    bench.run(models or bench.NETWORKS, rounds, json)


@app.command("input")
def input_pipelines(
    source: Annotated[Path, typer.Option(help="A folder of photos: class/photo.jpg.")],
    json: Json = None,
    image_size: Annotated[int, typer.Option(min=8, max=MOST, help="The side of the crops, in pixels.")] = 224,
    batch: Annotated[int, typer.Option(min=1, max=MOST, help="Images of a batch.")] = 64,
    images: Annotated[int, typer.Option(min=1, max=MOST, help="At most so many photos, evenly spread.")] = 2000,
    rounds: Annotated[int, typer.Option(min=1, max=MOST, help="Epochs of each arm; the median counts.")] = 7,
    workers: Annotated[
        list[int] | None,
        typer.Option(
            min=0, max=MOST, help="Workers that the peers are tried with; repeat.  Default: none to 2 a core."
        ),
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="as_is or full_size (longer side 500, 100 KB); repeat for both.")
    ] = None,
) -> None:
    """JPEGs to batches of random crops, against torch's DataLoader, torchvision, webdataset and the bare decoder."""
    bench = load_bench("input")
    require_folder_of(json)
    for name in sets or ():
        require_one_of("--set", name, bench.SETS)
    bench.run(source, sets or bench.SETS, image_size, batch, images, rounds, workers, json)


def load_bench(name: str) -> Any:
    """Import a bench only when it runs: its peers take seconds to import."""
    return importlib.import_module(f"megabatch_lab.bench.{name}")
