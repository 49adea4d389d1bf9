"""megabatch bench: every claim, measured beside its peer in the same run."""

import typer

app = typer.Typer(help="Measure megabatch beside its peers, in the same run.", no_args_is_help=True)
