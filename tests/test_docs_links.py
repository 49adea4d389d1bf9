"""The files, headings and footnotes that README and docs link to exist."""

import re
from pathlib import Path

import pytest

from tests.support.pages import FENCED, ROOT, headings, links, name_of, pages


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_link_leads_to_an_existing_file_and_heading(page: Path) -> None:
    wrong = []
    for link in links(page.read_text()):
        if re.match(r"https?://|mailto:", link.target):
            continue
        file, _, anchor = link.target.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or not target.is_relative_to(ROOT):
            wrong.append(f"{link.target}: no such file")
        elif anchor and anchor not in headings(target.read_text()):
            wrong.append(f"{link.target}: {name_of(target)} has {', '.join(headings(target.read_text()))}")
        elif link.is_picture and not link.text.strip():
            wrong.append(f"{link.target}: a picture needs a description")
    assert not wrong, "\n".join([name_of(page), *wrong])


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_footnote_is_defined_and_used(page: Path) -> None:
    text = FENCED.sub("", page.read_text())
    defined = re.findall(r"^\[\^([\w-]+)\]:", text, re.MULTILINE)
    used = set(re.findall(r"\[\^([\w-]+)\](?!:)", text))
    assert len(defined) == len(set(defined)) and set(defined) == used


def test_every_page_is_reachable_from_the_readme() -> None:
    reached, pending = set(), [ROOT / "README.md"]
    while pending:
        page = pending.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        files = (link.target.partition("#")[0] for link in links(page.read_text()) if "://" not in link.target)
        pending += [(page.parent / file).resolve() for file in files if file]
    assert [name_of(page) for page in pages() if page not in reached] == []


@pytest.mark.parametrize(
    ("title", "anchor"),
    [
        ("Your own model", "your-own-model"),
        ("`megabatch plan`", "megabatch-plan"),
        ("The backend's own sum", "the-backends-own-sum"),
        ("16 bits between hosts, sums in fp32", "16-bits-between-hosts-sums-in-fp32"),
        ("A, b & c", "a-b--c"),
    ],
)
def test_anchors_follow_githubs_rule(title: str, anchor: str) -> None:
    assert list(headings(f"# x\n## {title}\n## {title}\n")) == ["x", anchor, f"{anchor}-1"]
