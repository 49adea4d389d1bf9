"""megabatch pack: images into shards that are read fast."""

import shlex
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Self

import typer

from megabatch.cli.overrides import MOST
from megabatch.errors import UserError, require_one_of

if TYPE_CHECKING:
    from megabatch.data.pack.identity import PackSettings
    from megabatch.data.sources.files import EncodedDataset
    from megabatch.io.terminal import Terminal

QUIET_S = 10.0  # where there is no live bar, a line at least this often
MOST_NAMED = 20  # of images that were skipped or are damaged


def pack(
    source: Annotated[
        Path,
        typer.Argument(help="A folder of class folders, a folder of tars, a tar; or, with --verify alone, a pack."),
    ],
    out: Annotated[Path | None, typer.Argument(help="A new folder for the shards.", show_default=False)] = None,
    shorter_side: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Make larger images this small. Default: all bytes as they are.")
    ] = None,
    quality: Annotated[int, typer.Option(min=1, max=100, help="JPEG quality of images that are made smaller.")] = 90,
    shard_mb: Annotated[int, typer.Option(min=1, max=MOST, help="The most megabytes of a shard.")] = 256,
    on_error: Annotated[
        str, typer.Option(metavar="raise|skip", help="What to do with images that cannot be read.")
    ] = "raise",
    imagenet: Annotated[
        bool,
        typer.Option("--imagenet", help="SOURCE is ImageNet as it is downloaded: tars, or a flat val/, and devkit."),
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Then read all of it again and compare checksums.")] = False,
) -> None:
    """Pack images into shards. After a kill, the same command resumes."""
    require_one_of("--on-error", on_error, ("raise", "skip"))
    if out is None and not verify:
        raise UserError(f"megabatch pack {source} needs a folder to write to: megabatch pack {source} OUT")
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
        bar.show(progress.images, progress.total, progress.begun_with, progress.written_bytes)

    def read(source: Path) -> "EncodedDataset":
        dataset = read_imagenet(source) if imagenet else read_encoded(source)
        for line in warn_of_classes(dataset):
            console.row("warning", line)
        return dataset

    try:
        with bar:
            packed = pack(source, out, settings, show, read)
    except KeyboardInterrupt:
        raise UserError(f"{out} is not finished; the same command resumes after its last whole shard") from None
    shards = f"{packed.num_shards:,} shard" + "s" * (packed.num_shards > 1)
    images = f"{packed.num_images:,} images of {packed.num_classes:,} classes in {shards}"
    progress = packed.progress
    if progress is None:
        console.row("complete", f"{out} holds this pack already: {images}, {packed.written_bytes / 1e6:,.1f} MB")
        return
    console.row("packed", f"{images}: {out}")
    console.row("size", f"{progress.read_bytes / 1e6:,.1f} MB in, {packed.written_bytes / 1e6:,.1f} MB out")
    num_new = progress.images - progress.begun_with
    before = f", after {progress.begun_with:,} of an earlier command" if progress.begun_with else ""
    console.row("time", f"{packed.wall_s:.1f} s, {num_new / packed.wall_s:,.0f} images/s{before}")
    say_some(console, "skipped", progress.skipped)


def verify_pack(folder: Path, console: "Terminal") -> None:
    from megabatch.data.pack.verify import verify

    with Bar(console) as bar:
        damaged = verify(folder, lambda done, total: bar.show(done, total))
    if damaged:
        say_some(console, "damaged", damaged)
        raise UserError(f"{folder} is damaged, {len(damaged):,} x: first {damaged[0]}; copy or pack it again")
    console.row("verified", f"{folder}: every byte is as it was packed")


def say_some(console: "Terminal", name: str, lines: list[str]) -> None:
    for line in lines[:MOST_NAMED]:
        console.row(name, line)
    if len(lines) > 1:
        console.row(name, f"{len(lines):,} in all")


class Bar:
    """Images, MB/s and the time that is left: live on a terminal, a line now and then elsewhere."""

    def __init__(self, console: "Terminal") -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self.console = console
        self.bar = Progress(
            TextColumn("{task.completed:,}/{task.total:,} images", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}", markup=False),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task("", total=1, text="", visible=False)
        self.begin_s: float | None = None
        self.begin_bytes = 0
        self.spoke_s = time.monotonic()

    def show(self, done: int, total: int, begun_with: int = 0, written_bytes: int = 0) -> None:
        now_s = time.monotonic()
        if self.begin_s is None:  # the first call: what was there before counts for no speed
            self.begin_s, self.begin_bytes = now_s, written_bytes
        past_s = max(now_s - self.begin_s, 1e-3)
        images_per_s = max(done - begun_with, 1) / past_s
        speed = f"{images_per_s:,.0f}/s"
        if written_bytes:
            speed += f" {(written_bytes - self.begin_bytes) / past_s / 1e6:,.1f} MB/s"
        text = f"{speed} ETA {(total - done) / images_per_s:,.0f} s"
        self.bar.update(self.task, completed=done, total=total, text=text, visible=True)
        if not self.console.is_terminal and now_s - self.spoke_s > QUIET_S:
            self.console.print(f"{done:,}/{total:,} images {text}")
            self.spoke_s = now_s

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()
