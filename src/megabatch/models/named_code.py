"""Python code that a file names as its model.

The user writes a recipe, which may name any `package.module:factory`.  The folder of a run or the file of a model may
come from an untrusted source, and could run arbitrary code with torch.hub:load and its options.  So code that they name
is imported only if the user names it too.
"""

from megabatch.errors import UserError
from megabatch.models.catalog import ModelSettings


def require_named(settings: ModelSettings, named: str | None, where: str, remedy: str) -> None:
    """Check that the user named the custom code of a model.  Built-in models need not be named."""
    if settings.is_user_model and settings.name != named:
        options = f" with model.options={settings.options}" if settings.options else ""
        raise UserError(
            f"{where}: its model is Python code, {settings.name}{options}, which would be imported and run; "
            f"if you trust it, add {remedy}"
        )
