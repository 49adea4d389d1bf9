"""megabatch check: decodes every image of a data set and lists the files that cannot be read."""

import msgspec
import typer

from megabatch.cli.overrides import Arguments, load_recipe
from megabatch.io.numbers import plural
from megabatch.text import one_line

BATCH = 64


def check(given: Arguments = None) -> None:
    """Read all images of a folder or recipe. If any cannot be read, list them and exit with code 1.

    [bold]megabatch check[/bold] photos/
    """
    from megabatch.data.catalog import load_data_set
    from megabatch.data.pipeline.batches import evaluation_batches
    from megabatch.io.terminal import Terminal
    from megabatch.ranks.machine import usable_cores
    from megabatch.training.screen import describe_classes

    config = load_recipe(given)
    settings = msgspec.structs.replace(config.data, on_error="skip", skip_limit=1.0)
    data, console, num_bad = load_data_set(settings, len(usable_cores())), Terminal(), 0
    console.row("data", f"{settings.source}: {len(data.train):,} + {len(data.test):,} images, {describe_classes(data)}")
    for line in data.warnings:
        console.row("warning", line)
    for images in (data.train, data.test):
        for _, batch in evaluation_batches(images, BATCH, rank=0, num_ranks=1):
            num_bad += len(batch.skipped)
            for line in batch.skipped:
                console.row("bad", one_line(line))
    total = len(data.train) + len(data.test)
    console.row("result", f"{num_bad:,} of {plural(total, 'image')} cannot be read")
    if num_bad:
        raise typer.Exit(1)
