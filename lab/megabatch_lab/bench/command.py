"""megabatch bench: measure megabatch and its peers in the same run."""

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from megabatch.cli.overrides import MOST, require_folder_of
from megabatch.errors import UserError, require_one_of
from megabatch.ranks.lifecycle import exit_like_ranks, run_as_rank, start_ranks

app = typer.Typer(help="Measure megabatch and its peers in the same run.", no_args_is_help=True)

Json = Annotated[Path | None, typer.Option("--json", help="Write the command, the machine and the rows to this file.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Models = Annotated[list[str] | None, typer.Option("--model", help="A model; repeat for several.")]


@app.callback()
def benches() -> None:
    """Measure megabatch and its peers in the same run."""


@app.command()
def train(
    json: Json = None,
    ranks: Annotated[int, typer.Option(min=1, max=MOST, help="Ranks on this machine.")] = 2,
    rounds: Annotated[int, typer.Option(min=3, max=MOST, help="Blocks of steps per arm; the median is reported.")] = 81,
    device: Device = "auto",
    models: Models = None,
) -> None:
    """Compare our trainer with stock DistributedDataParallel, in images per second."""
    from megabatch.ranks.discover import discover

    bench = load_bench("train")
    require_folder_of(json)
    chosen = models or list(bench.WORKLOADS)
    for model in chosen:
        require_one_of("--model", model, bench.WORKLOADS)
    info = discover()
    if info:
        run_as_rank(info, lambda store: bench.run_rank(store.info, store, device, rounds, chosen, json))
    else:
        start_ranks(sys.argv[1:], ranks)


@app.command()
def allreduce(
    json: Json = None,
    ranks: Annotated[int, typer.Option(min=1, max=MOST, help="Ranks on this machine.")] = 2,
    rounds: Annotated[
        int, typer.Option(min=9, max=MOST, help="Turns per arm; the median of all calls is reported.")
    ] = 25,
    sizes: Annotated[
        list[int] | None, typer.Option("--bytes", min=1, max=1 << 40, help="A size; repeat for several.")
    ] = None,
) -> None:
    """Compare our shared-memory all-reduce with Gloo's and MPICH's."""
    from megabatch.ranks.discover import discover

    bench = load_bench("allreduce")
    require_folder_of(json)
    info = discover()
    if info:
        run_as_rank(info, lambda store: bench.run_rank(store.info, store, rounds, sizes or bench.SIZES, json))
    elif bench.has_mpi(ranks):
        bench.become_mpiexec(sys.argv[1:], ranks)
    else:
        start_ranks(sys.argv[1:], ranks)


@app.command()
def cluster(
    json: Json = None,
    hosts: Annotated[int, typer.Option(help="Nodes, 2 to 4. Each is a network namespace of this machine.")] = 2,
    ranks_per_host: Annotated[
        str | None, typer.Option(help="Numbers of ranks to try: 2,4 on every node; 2+1 on two nodes.")
    ] = None,
    gbps: Annotated[str | None, typer.Option(help="Network card rates to try: 1,2.5.")] = None,
    comm_dtype: Annotated[str | None, typer.Option(help="Comm dtypes to try between nodes: same,bf16,fp16.")] = None,
    models: Models = None,
    rounds: Annotated[int, typer.Option(min=9, max=MOST, help="Turns per arm; the median is reported.")] = 9,
    compare: Annotated[bool, typer.Option("--compare", help="Also force each algorithm in turn.")] = False,
    train: Annotated[bool, typer.Option("--train", help="Compare training steps of AlexNet-BN instead.")] = False,
) -> None:
    """Compare our all-reduce between nodes with Gloo as DDP calls it.  Needs root and iproute2."""
    bench = load_bench("cluster")
    require_folder_of(json)
    request = bench.read_request(hosts, ranks_per_host, gbps, comm_dtype, models, compare, train)
    with exit_like_ranks():
        bench.run(request, rounds, json)


@app.command()
def planning(
    json: Json = None,
    rounds: Annotated[int, typer.Option(min=1, max=MOST, help="Rounds per cluster; the median is reported.")] = 5,
) -> None:
    """Measure how long the choice of buckets and plans takes for 2,048 and 16,384 ranks."""
    bench = load_bench("planning")
    require_folder_of(json)
    bench.run(rounds, json)


@app.command()
def startup(
    json: Json = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks to try, 8 per node.")] = "8,256,2048",
    rounds: Annotated[int, typer.Option(min=1, max=MOST, help="Starts per number; the median is reported.")] = 3,
) -> None:
    """Measure the start and one step of a single rank out of thousands, without the other ranks."""
    bench = load_bench("startup")
    require_folder_of(json)
    bench.run(bench.read_numbers(ranks), rounds, json)


@app.command()
def launches(
    json: Json = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=MOST, help="Turns per arm; the median of all steps is reported.")
    ] = 9,
    threads: Annotated[int, typer.Option(min=1, max=4096, help="Decoding threads.")] = 1,
) -> None:
    """Measure the host time per step on a GPU, with idle and with busy decoders."""
    bench = load_bench("launches")
    require_folder_of(json)
    bench.run(rounds, threads, json)


@app.command()
def soak(
    json: Json = None,
    steps: Annotated[int, typer.Option(min=1000, max=MOST, help="Steps of the run.")] = 20_000,
    ranks: Annotated[int, typer.Option(min=1, max=MOST, help="Ranks on this machine.")] = 2,
) -> None:
    """Check that memory, threads, files and speed stay constant in a long run. If not, exit with code 1."""
    bench = load_bench("soak")
    require_folder_of(json)
    if not bench.run(steps, ranks, json):
        raise typer.Exit(1)


@app.command()
def merging(
    json: Json = None,
    presets: Annotated[list[str] | None, typer.Option("--cluster", help="A preset; repeat for several.")] = None,
) -> None:
    """Simulate the gain of one plan per bucket over a single plan and threshold, on the presets."""
    bench = load_bench("merging")
    require_folder_of(json)
    bench.run(json, presets)


@app.command()
def simulator(
    json: Json = None,
    parts: Annotated[
        list[str] | None,
        typer.Option("--part", help="here, published, paper, guide or batch; repeat for several. Default: all."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot predicted against measured values to this SVG file.")] = None,
    docs: Annotated[Path | None, typer.Option(help="Update the tables in this Markdown page.")] = None,
    rounds: Annotated[
        int, typer.Option(min=3, max=MOST, help="Turns per arm on this machine; the median is reported.")
    ] = 5,
) -> None:
    """Compare the simulator with measurements: on this machine, on published clusters, in the paper."""
    bench = load_bench("simulator")
    require_folder_of(json)
    require_folder_of(plot, "--plot")
    if docs and not docs.is_file():
        raise UserError(f"--docs {docs} is not a page with table markers; for example --docs docs/scaling.md")
    for part in parts or ():
        require_one_of("--part", part, bench.PARTS)
    with exit_like_ranks():
        bench.run(parts or bench.default_parts(), rounds, json, plot, docs)


@app.command()
def optimizer(
    json: Json = None,
    rounds: Annotated[int, typer.Option(min=3, max=MOST, help="Steps per arm; the median is reported.")] = 31,
    models: Models = None,
) -> None:
    """Compare a LARS step with other implementations and with fused SGD, on one core and on all."""
    bench = load_bench("optimizer")
    require_folder_of(json)
    bench.run(models or bench.NETWORKS, rounds, json)


@app.command("input")
def input_pipelines(
    source: Annotated[Path, typer.Option(help="A folder of photos: class/photo.jpg.")],
    json: Json = None,
    image_size: Annotated[int, typer.Option(min=8, max=MOST, help="Side of the crops in pixels.")] = 224,
    batch: Annotated[int, typer.Option(min=1, max=MOST, help="Images per batch.")] = 64,
    images: Annotated[int, typer.Option(min=1, max=MOST, help="Maximum number of photos, evenly spread.")] = 2000,
    rounds: Annotated[int, typer.Option(min=1, max=MOST, help="Epochs per arm; the median is reported.")] = 7,
    workers: Annotated[
        list[int] | None,
        typer.Option(min=0, max=MOST, help="Workers to try for the peers; repeat.  Default: 0 to 2 per core."),
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="as_is or full_size (longer side 500, 100 KB); repeat for both.")
    ] = None,
) -> None:
    """Compare JPEG input with torch's DataLoader, torchvision, webdataset and the bare decoder."""
    bench = load_bench("input")
    require_folder_of(json)
    for name in sets or ():
        require_one_of("--set", name, bench.SETS)
    bench.run(source, sets or bench.SETS, image_size, batch, images, rounds, workers, json)


def load_bench(name: str) -> Any:
    """Import a bench only when it runs, because its peers take seconds to import."""
    return importlib.import_module(f"megabatch_lab.bench.{name}")
