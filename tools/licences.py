"""Write the licences of all pinned packages to docs/licences.md, and fail if a licence is not allowed.

python tools/licences.py        # in the .venv of `make test`, or run `make licences`
"""

import re
import sys
from email.message import Message
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/licences.md"
# Permissive licences, which only require their notice and are compatible with Apache-2.0.
ALLOWED = {
    *("0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0"),
    *("CC0-1.0", "ISC", "MIT", "MIT-CMU", "PSF-2.0", "Zlib"),
}
EXCEPTIONS = {
    "hypothesis": "MPL-2.0: only runs tests and is not distributed with megabatch",
    "pathspec": "MPL-2.0: only used by the build tool, unchanged, and not distributed with megabatch",
    "mpich": "LicenseRef-MPICH is a permissive licence: only a bench calls the library",
}
# SPDX names for packages that use other names.
SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
SETS = {
    "To train": ("train", "torch-cpu"),
    "To test and to bench": ("dev",),
}
HEADER = """\
# Licences of the packages that `make` installs

`make licences` writes this page from the packages' metadata. It fails if a licence is not in the short list of
`tools/licences.py`. megabatch distributes none of these packages. On Linux, torch from the package index installs
CUDA's libraries (`cuda-*` and `nvidia-*` in `requirements/torch.txt`), which have NVIDIA's licence and are not listed.
"""


def licence_of(metadata: Message) -> str:
    """Return License-Expression, or else the classifier, or else the field License, which may be a long text."""
    if expression := metadata["License-Expression"]:
        return str(expression)
    classifiers = [str(line) for line in metadata.get_all("Classifier", []) if line.startswith("License :: ")]
    name = classifiers[-1].rpartition(" :: ")[2] if classifiers else str(metadata["License"]).strip().split("\n")[0]
    return SPDX.get(name, name)


def is_allowed(licence: str) -> bool:
    """Return True if every licence of an expression is allowed.  No package offers a choice with one that is not."""
    return all(part.strip(" ()") in ALLOWED for part in re.split(r" AND | OR ", licence))


def pinned_names(subject: str) -> list[str]:
    return re.findall(r"^([\w.-]+)==", (ROOT / f"requirements/{subject}.txt").read_text(), flags=re.MULTILINE)


def main() -> None:
    lines, refused = [HEADER], []
    for title, subjects in SETS.items():
        lines += [f"## {title}", "| package | version | licence |", "|---|---|---|"]
        for name in [name for subject in subjects for name in pinned_names(subject)]:
            metadata = distribution(name).metadata
            version = metadata["Version"].partition("+")[0]  # the same for torch with and without CUDA
            licence = licence_of(metadata)  # type: ignore[arg-type]
            if not is_allowed(licence) and name not in EXCEPTIONS:
                refused.append(f"{name} {version}: {licence}")
            reason = f"; {EXCEPTIONS[name].partition(': ')[2]}" if name in EXCEPTIONS else ""
            lines.append(f"| {name} | {version} | {licence}{reason} |")
        lines.append("")
    PAGE.write_text("\n".join(lines).rstrip("\n") + "\n")
    if refused:
        sys.exit(f"licences neither in ALLOWED nor in EXCEPTIONS of {Path(__file__).name}: {'; '.join(refused)}")


if __name__ == "__main__":
    main()
