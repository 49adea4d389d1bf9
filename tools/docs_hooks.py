"""Hooks of `make docs`: pages in the root of the repository become pages of the site.

On GitHub, docs/ links to ../CONTRIBUTING.md, and CONTRIBUTING.md links to docs/. In the site both are in one folder.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name in ROOT_PAGES:
        text = (ROOT / name).read_text()
        files.append(File.generated(config, name, content=re.sub(r"\]\(docs/", "](", text)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    # The README of the repository is not a page of the site: docs/README.md is its index.
    linked = re.sub(rf"\]\(\.\./({'|'.join(map(re.escape, ROOT_PAGES))})", r"](\1", markdown)
    return re.sub(r"\[([^]]*)\]\(\.\./(?:README\.md|src/|lab/|tests/)[^)]*\)", r"\1", linked)
