"""docs/errors.md quotes messages that are in the source."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import megabatch
from tests.support.pages import ROOT

PACKAGE = Path(megabatch.__file__).parent
OTHERS = "## From other programs"
GAP = "…"


def quoted() -> list[str]:
    """Return the first column of the tables, without messages of other programs."""
    text = (ROOT / "docs/errors.md").read_text().partition(OTHERS)[0]
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def template_of(node: ast.expr) -> str:
    """Return a string of the source, with a gap for each inserted value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template_of(value) if isinstance(value, ast.Constant) else GAP for value in node.values)
    return GAP


def strings() -> Iterator[str]:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant | ast.JoinedStr):
                yield template_of(node)


def test_every_quoted_error_is_in_the_source() -> None:
    assert len(quoted()) >= 35
    messages = [text for text in strings() if len(text) > 8]
    missing = []
    for line in quoted():
        # A value may be inserted as part of a longer text, or be at the end of the quote.
        fixed = [re.escape(part.strip()) for part in line.split(GAP) if len(part.strip(" :;,.()=")) > 0]
        pattern = re.compile(r".*".join(fixed), re.DOTALL)
        if not any(pattern.search(text) for text in messages):
            missing.append(line)
    assert not missing, "docs/errors.md quotes messages that are not in src"


def test_a_message_that_is_not_in_the_source_is_not_found() -> None:
    assert not any("is not a whole number of macrobatches" in text for text in strings())
    assert all(re.search(r"\w{3}", line) for line in quoted())
