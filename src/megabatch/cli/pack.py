"""megabatch pack: images in shards that are fast to read."""

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

from megabatch.cli.overrides import MOST
from megabatch.errors import UserError, require_one_of
from megabatch.io.numbers import in_mb, plural

if TYPE_CHECKING:
    from megabatch.data.pack.identity import PackSettings
    from megabatch.data.sources.files import EncodedDataset
    from megabatch.io.terminal import Terminal

QUIET_S = 10.0  # without a live bar, print a line at least this often
MOST_NAMED = 20  # skipped or damaged images that are listed


def pack(
    source: Annotated[
        Path,
        typer.Argument(
            help="A folder of class folders, a CSV file, a folder of tars or a tar. With only --verify: a pack."
        ),
    ],
    out: Annotated[Path | None, typer.Argument(help="A new folder for the shards.", show_default=False)] = None,
    shorter_side: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help="Resize larger images to this shorter side. Default: keep all bytes."),
    ] = None,
    quality: Annotated[int, typer.Option(min=1, max=100, help="JPEG quality of resized images.")] = 90,
    shard_mb: Annotated[int, typer.Option(min=1, max=MOST, help="Largest size of a shard, in MB.")] = 256,
    on_error: Annotated[
        str, typer.Option(metavar="raise|skip", help="Action for images that cannot be read.")
    ] = "raise",
    imagenet: Annotated[
        bool,
        typer.Option("--imagenet", help="SOURCE is ImageNet as downloaded: tars or a flat val/, and the devkit."),
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the whole pack afterwards and compare checksums.")
    ] = False,
) -> None:
    """Pack images into shards. If it is interrupted, the same command resumes."""
    require_one_of("--on-error", on_error, ("raise", "skip"))
    if out is None and not verify:
        raise UserError(f"megabatch pack {source}: no output folder is given; use megabatch pack {source} OUT")
    from megabatch.io.terminal import Terminal

    console = Terminal()
    if out is not None:
        from megabatch.data.pack.identity import PackSettings

        pack_to(
            out,
            source,
            PackSettings(shorter_side=shorter_side, quality=quality, shard_mb=shard_mb, on_error=on_error),  # type: ignore[arg-type]
            console,
            imagenet,
        )
    if verify:
        verify_pack(out or source, console)
    recipe = "resnet50-imagenet-256" if imagenet else "photos"
    console.row("train", f"megabatch train {recipe} {shlex.quote(f'data.source={out or source}')}")


def pack_to(out: Path, source: Path, settings: "PackSettings", console: "Terminal", imagenet: bool) -> None:
    from megabatch.data.catalog import read_encoded
    from megabatch.data.pack.write import Progress, pack
    from megabatch.data.sources.folders import warn_of_classes
    from megabatch.data.sources.imagenet import read_imagenet

    bar = Bar(console)

    def show(progress: Progress) -> None:
        bar.show(progress.images, progress.total, progress.num_resumed, progress.written_bytes)

    def read(source: Path) -> "EncodedDataset":
        dataset = read_imagenet(source) if imagenet else read_encoded(source)
        for line in warn_of_classes(dataset):
            console.row("warning", line)
        return dataset

    try:
        with bar:
            packed = pack(source, out, settings, show, read)
    except KeyboardInterrupt:
        raise UserError(f"{out} is incomplete; run the same command again to resume it") from None
    shards = plural(packed.num_shards, "shard")
    images = f"{packed.num_images:,} images of {packed.num_classes:,} classes in {shards}"
    progress = packed.progress
    if progress is None:
        console.row("complete", f"{out} already contains this pack: {images}, {in_mb(packed.written_bytes)} MB")
        return
    console.row("packed", f"{images}: {out}")
    console.row("size", f"{in_mb(progress.read_bytes)} MB in, {in_mb(packed.written_bytes)} MB out")
    num_new = progress.images - progress.num_resumed
    before = f", after {progress.num_resumed:,} images of an earlier command" if progress.num_resumed else ""
    console.row("time", f"{packed.wall_s:.1f} s, {num_new / packed.wall_s:,.0f} images/s{before}")
    print_some(console, "skipped", progress.skipped)


def verify_pack(folder: Path, console: "Terminal") -> None:
    from megabatch.data.pack.shards import verify

    with Bar(console) as bar:
        damaged = verify(folder, lambda done, total: bar.show(done, total))
    if damaged:
        print_some(console, "damaged", damaged)
        raise UserError(f"{folder}: {plural(len(damaged), 'error')}, first {damaged[0]}; copy or pack it again")
    console.row("verified", f"{folder}: all checksums match")


def print_some(console: "Terminal", name: str, lines: list[str]) -> None:
    for line in lines[:MOST_NAMED]:
        console.row(name, line)
    if len(lines) > 1:
        console.row(name, f"{len(lines):,} in total")


class Bar:
    """Progress in images, MB/s and time left: live on a terminal, otherwise a line every QUIET_S."""

    def __init__(self, console: "Terminal") -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self.console = console
        self.bar = Progress(
            TextColumn("{task.completed:,}/{task.total:,} images", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}", markup=False),
            console=console,
            disable=not console.is_live,
            transient=True,
        )
        self.task = self.bar.add_task("", total=1, text="", visible=False)
        self.begin_s: float | None = None
        self.begin_bytes = 0
        self.printed_s = time.monotonic()

    def show(self, done: int, total: int, num_resumed: int = 0, written_bytes: int = 0) -> None:
        now_s = time.monotonic()
        if self.begin_s is None:  # the first call: images of an earlier command do not count towards the speed
            self.begin_s, self.begin_bytes = now_s, written_bytes
        past_s = max(now_s - self.begin_s, 1e-3)
        images_per_s = max(done - num_resumed, 1) / past_s
        speed = f"{images_per_s:,.0f}/s"
        if written_bytes:
            speed += f" {in_mb((written_bytes - self.begin_bytes) / past_s)} MB/s"
        text = f"{speed} ETA {(total - done) / images_per_s:,.0f} s"
        self.bar.update(self.task, completed=done, total=total, text=text, visible=True)
        if not self.console.is_live and now_s - self.printed_s > QUIET_S:
            self.console.print(f"{done:,}/{total:,} images {text}")
            self.printed_s = now_s

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()
