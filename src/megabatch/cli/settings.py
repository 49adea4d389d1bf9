"""megabatch settings: the reference of all settings."""

from typing import Annotated

import typer

from megabatch.errors import UserError
from megabatch.text import print_text


def settings(
    part: Annotated[
        str, typer.Argument(help="Only settings whose names contain this: a section or a word.", show_default=False)
    ] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/settings.md.")] = False,
) -> None:
    """List the settings of a recipe with their types, ranges, defaults and meanings.

    [bold]megabatch settings[/bold] optim
    """
    from rich.padding import Padding
    from rich.text import Text

    from megabatch.config.messages import show_key, suggest
    from megabatch.config.settings_page import all_settings, page, plain
    from megabatch.io.terminal import BOLD, Terminal

    if markdown:
        if part:
            raise UserError(f"--markdown prints the whole page; remove {show_key(part)}")
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
