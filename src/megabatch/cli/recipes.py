"""megabatch recipes: the recipes that come with megabatch."""


def recipes() -> None:
    """List the recipes that come with megabatch, and which of their values no source gives."""
    from rich.padding import Padding
    from rich.text import Text

    from megabatch.config.loading import load_config, settings_by_provenance
    from megabatch.config.recipes import recipe_names
    from megabatch.io.terminal import BOLD, Terminal

    console = Terminal(soft_wrap=False)
    configs = [load_config(name) for name in recipe_names()]
    for config in sorted(configs, key=lambda each: (each.model.name, each.data.source, each.batch.global_batch)):
        batch, length = config.batch.global_batch, config.train.length
        what = f"{config.model.name}, batch {batch:,}, {config.optim.name}, {length}"
        console.print(Text.assemble((config.name, BOLD), f"  {what}"))
        lines = [config.about, *(f"{kind}: {', '.join(keys)}" for kind, keys in settings_by_provenance(config).items())]
        console.print(Padding("\n".join(lines), (0, 0, 0, 4)))
    console.print(
        "\nmegabatch show RECIPE prints a recipe in full, with where each value comes from; "
        "megabatch train RECIPE section.key=value changes it."
    )
