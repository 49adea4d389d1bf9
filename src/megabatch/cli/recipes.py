"""megabatch recipes: the recipes that come with megabatch."""


def recipes() -> None:
    """List the recipes that come with megabatch."""
    from rich.console import Console
    from rich.padding import Padding

    from megabatch.config import load_config, recipe_names

    console = Console(highlight=False)
    indent = 2 + max(map(len, recipe_names()))
    for name in recipe_names():
        config = load_config(name)
        console.print(
            f"[bold]{name:<{indent}}[/bold]{config.model.name} on {config.data.source}, "
            f"batch {config.batch.global_batch:,}, {config.train.epochs:g} epochs"
        )
        console.print(Padding(config.about, (0, 0, 0, indent)))
    console.print(
        "\nmegabatch show RECIPE prints a recipe in full; megabatch train RECIPE section.key=value changes it."
    )
