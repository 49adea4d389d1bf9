"""megabatch settings: every setting of a recipe, as the schema has it."""

from typing import Annotated

import typer

from megabatch.errors import UserError
from megabatch.text import print_text


def settings(
    part: Annotated[
        str, typer.Argument(help="Those whose names hold this: a section, or a word.", show_default=False)
    ] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/settings.md.")] = False,
) -> None:
    """List every setting of a recipe: what it takes, its default, what it means.

    [bold]megabatch settings[/bold] optim
    """
    from rich.padding import Padding
    from rich.text import Text

    from megabatch.config.messages import show_key, suggest
    from megabatch.config.settings_page import all_settings, page, plain
    from megabatch.io.terminal import BOLD, Terminal

    if markdown:
        if part:
            raise UserError(f"--markdown prints the whole page; leave {show_key(part)} out")
        print_text(page().rstrip("\n"))
        return
    found = [setting for setting in all_settings() if part in setting.name]
    if not found:
        raise UserError(f"no setting has {show_key(part)} in its name; {suggest(part)}")
    console = Terminal(soft_wrap=False)
    for setting in found:
        console.print(
            Text.assemble((setting.name, BOLD), f"  {plain(setting.takes)}; default: {plain(setting.default)}")
        )
        console.print(Padding(plain(setting.meaning), (0, 0, 0, 4)))
