"""The Markdown pages of this repository: fenced blocks, their commands, links and headings."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
SHELL = ("", "bash", "sh")


def pages() -> list[Path]:
    """Return the Markdown pages in the root and in docs."""
    found = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    assert len(found) > 20
    return found


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


class Command(NamedTuple):
    """A shell line that ends with a megabatch command."""

    page: str
    line: str  # without its comment
    prefix: str  # a pipe or launcher before it: cat x |, torchrun ... -m
    words: tuple[str, ...]  # after `megabatch`
    output: str  # the file that its output is redirected to
    message: str  # the "megabatch: " line that the page shows below it, or ""


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for language, text in FENCED.findall(page.read_text()):
        if language in languages:
            yield text


def shell_lines(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command with the line below it.  If any line starts with $, the lines without $ are output."""
    lines = text.replace("\\\n", " ").splitlines()
    prompts = any(line.strip().startswith("$ ") for line in lines)
    for number, line in enumerate(lines):
        if prompts and not line.strip().startswith("$ "):
            continue
        below = lines[number + 1].strip() if number + 1 < len(lines) else ""
        yield line.strip().removeprefix("$ "), below


def commands(page: Path) -> Iterator[Command]:
    for text in blocks(page, *SHELL):
        for line, below in shell_lines(text):
            line = line.partition("  #")[0].rstrip()
            place = re.search(r"(?:^| )megabatch(?= |$)", line)
            if not place:
                continue
            rest, _, output = line[place.end() :].partition(" > ")
            words = tuple(word for word in shlex.split(rest, comments=True) if word != "...")
            message = below.removeprefix("megabatch: ") if below.startswith("megabatch: ") else ""
            yield Command(name_of(page), line, line[: place.start()].strip(), words, output.strip(), message)


def inline_commands(page: Path) -> Iterator[str]:
    """Yield commands in a sentence or a table, such as `megabatch bench train`."""
    for text in INLINE.findall(FENCED.sub("", page.read_text())):
        if re.match(r"megabatch [a-z]", text):
            yield " ".join(text.split())


def headings(text: str) -> Iterator[str]:
    """Yield a page's anchors by GitHub's rule: lower case, no punctuation, hyphens for spaces, -1 for a duplicate."""
    seen: dict[str, int] = {}
    for title in re.findall(r"^#{1,6} +(.*?) *$", FENCED.sub("", text), re.MULTILINE):
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        count = seen[slug] = seen.get(slug, -1) + 1
        yield f"{slug}-{count}" if count else slug


class Link(NamedTuple):
    text: str
    target: str
    is_picture: bool


def links(text: str) -> Iterator[Link]:
    """Yield links in Markdown and HTML, except those in code."""
    text = INLINE.sub(lambda code: "x" * len(code[0]), FENCED.sub("", text))
    for mark, words, target in re.findall(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^()\s]+)\)", text):
        yield Link(words, target, bool(mark))
        yield from links(words)  # a picture inside a link
    for tag in re.findall(r"<(?:img|source|a)\b[^>]*>", text):
        attributes = dict(re.findall(r'(\w+)="([^"]*)"', tag))
        target = attributes.get("src") or attributes.get("srcset") or attributes.get("href") or ""
        yield Link(attributes.get("alt", ""), target, tag.startswith("<img"))
