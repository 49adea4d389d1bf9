"""megabatch recipes: the recipes that come with megabatch."""


def recipes() -> None:
    """List the recipes that come with megabatch."""
    from rich.console import Console
    from rich.table import Table

    from megabatch.config import load_config, recipe_names

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, justify in (("recipe", "left"), ("model", "left"), ("data", "left"), ("batch", "right")):
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("epochs", justify="right")
    table.add_column("about")
    for name in recipe_names():
        config = load_config(name)
        table.add_row(
            name,
            config.model.name,
            config.data.source,
            f"{config.batch.global_batch:,}",
            f"{config.train.epochs:g}",
            config.about,
        )
    Console().print(table)
