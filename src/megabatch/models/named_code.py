"""Python code that a file names as its model.

A recipe is the user's own, and may name any `package.module:factory`.  The folder of a run and a model's file may come
from anybody, and torch.hub:load with the options to it is all that it takes to run what they please: such code is
imported only if the user names it too.
"""

from megabatch.errors import UserError
from megabatch.models.catalog import ModelSettings


def require_named(settings: ModelSettings, named: str | None, where: str, remedy: str) -> None:
    """`named` is what the user has named; our own models need not be."""
    if settings.is_users_own and settings.name != named:
        options = f" with model.options={settings.options}" if settings.options else ""
        raise UserError(
            f"{where} says that its model is Python code, {settings.name}{options}, which would be imported and run; "
            f"if you trust it, add {remedy}"
        )
