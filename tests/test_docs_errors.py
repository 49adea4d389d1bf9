"""docs/errors.md quotes what the source says."""

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
    """The first column of its tables, as far as we are the ones who say it."""
    text = (ROOT / "docs/errors.md").read_text().partition(OTHERS)[0]
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def templates(node: ast.expr) -> str:
    """A string of the source, with a gap wherever something is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(templates(value) if isinstance(value, ast.Constant) else GAP for value in node.values)
    return GAP


def strings() -> Iterator[str]:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant | ast.JoinedStr):
                yield templates(node)


def test_every_error_of_the_page_is_one_that_is_raised() -> None:
    assert len(quoted()) >= 35
    said = [text for text in strings() if len(text) > 8]
    missing = []
    for line in quoted():
        # What differs may be a part of another sentence there, or end the message here.
        fixed = [re.escape(part.strip()) for part in line.split(GAP) if len(part.strip(" :;,.()=")) > 0]
        pattern = re.compile(r".*".join(fixed), re.DOTALL)
        if not any(pattern.search(text) for text in said):
            missing.append(line)
    assert not missing, "docs/errors.md quotes what is nowhere in src"


def test_a_line_that_is_not_ours_would_be_missed() -> None:
    assert not any("is not a whole number of macrobatches" in text for text in strings())
    assert all(re.search(r"\w{3}", line) for line in quoted())
