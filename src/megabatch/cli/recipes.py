"""megabatch recipes: the recipes that come with megabatch."""

from typing import TYPE_CHECKING

from megabatch.io.numbers import plural

if TYPE_CHECKING:
    from megabatch.config.recipes import Published
    from megabatch.config.schema import RunConfig


def recipes() -> None:
    """List the built-in recipes, with the published results that they repeat and values without a published source."""
    from rich.padding import Padding
    from rich.text import Text

    from megabatch.config.loading import load_config, settings_by_provenance
    from megabatch.config.recipes import read_published, recipe_names
    from megabatch.io.terminal import BOLD, Terminal

    console = Terminal(soft_wrap=False)
    known = {name: load_config(name) for name in recipe_names()}
    order = sorted(known, key=lambda name: (known[name].model.name, known[name].data.source, sort_key(known[name])))
    for name in order:
        config, published = known[name], read_published(name)
        what = f"{config.model.name}, batch {config.batch.global_batch:,}, {config.optim.name}, {length(config)}"
        console.print(Text.assemble((name, BOLD), f"  {what}"))
        lines = [config.about, *([describe_result(published)] if published else [])]
        lines += [f"{kind}: {', '.join(keys)}" for kind, keys in settings_by_provenance(config).items()]
        console.print(Padding("\n".join(lines), (0, 0, 0, 4)))
    console.print(
        "\nmegabatch show RECIPE prints a recipe in full, with the origin of each value; "
        "megabatch train RECIPE section.key=value overrides a setting."
    )


def sort_key(config: "RunConfig") -> tuple[int, float]:
    return config.batch.global_batch, config.train.epochs or 0.0


def length(config: "RunConfig") -> str:
    """Return the length; for ImageNet also in epochs at 224 pixels, a unit of compute."""
    from megabatch.config.resolve import plan_run
    from megabatch.data.sources.shapes import IMAGENET
    from megabatch.planning.sizes import base_epochs, plan_stages

    if config.data.source != "imagenet":
        return config.train.length
    plan = plan_run(config, IMAGENET, num_ranks=1)
    stages = plan_stages(config.data.sizes, config.data.image_size, plan.num_steps)
    return f"{config.train.length} = {base_epochs(stages, plan.epochs_after(1)):.1f} at 224 pixels"


def describe_result(published: "Published") -> str:
    """Return the published result, such as "top-1 0.766 on 8 devices in 28.7 minutes; source: ..."."""
    words = [f"top-1 {published.top1:g}"] if published.top1 else []
    words += [f"on {plural(published.ranks, 'device')}"] if published.ranks else []
    words += [f"in {published.minutes:g} minutes"] if published.minutes else []
    return f"{' '.join(words)}{'; ' if words else ''}source: {published.source}"
