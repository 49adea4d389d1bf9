"""Writes docs/licences.md: what each pinned package says of its licence; fails if one is not allowed here.

python tools/licences.py        # in the .venv of `make test`, as `make licences` does
"""

import re
import sys
from email.message import Message
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/licences.md"
# They ask for their notice to be kept, and nothing of who uses them in a program under Apache-2.0.
ALLOWED = {
    *("0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0"),
    *("CC0-1.0", "ISC", "MIT", "MIT-CMU", "PSF-2.0", "Zlib"),
}
EXCEPTIONS = {
    "hypothesis": "MPL-2.0: it runs tests and is no part of what we distribute",
    "pathspec": "MPL-2.0: the build tool uses it, unchanged, and it is no part of what we distribute",
    "mpich": "LicenseRef-MPICH is MPICH's own permissive notice: a bench calls the library, nobody else does",
}
# What packages say who do not use SPDX's names.
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
# Licences of what `make` installs

Written by `make licences` from the packages' own metadata; it fails where a licence is not in the short list of
`tools/licences.py`. We distribute none of these packages. torch from the package index brings CUDA's libraries on Linux
(`cuda-*` and `nvidia-*` in `requirements/torch.txt`), which are under NVIDIA's own licence and not listed here.
"""


def licence_of(metadata: Message) -> str:
    """License-Expression; else the classifier, else the field License, which may be a whole text."""
    if expression := metadata["License-Expression"]:
        return str(expression)
    classifiers = [str(line) for line in metadata.get_all("Classifier", []) if line.startswith("License :: ")]
    said = classifiers[-1].rpartition(" :: ")[2] if classifiers else str(metadata["License"]).strip().split("\n")[0]
    return SPDX.get(said, said)


def is_allowed(licence: str) -> bool:
    """Every licence of an expression is: no package here offers one of ours beside one that is not."""
    return all(part.strip(" ()") in ALLOWED for part in re.split(r" AND | OR ", licence))


def pinned_names(subject: str) -> list[str]:
    return re.findall(r"^([\w.-]+)==", (ROOT / f"requirements/{subject}.txt").read_text(), flags=re.MULTILINE)


def main() -> None:
    lines, refused = [HEADER], []
    for title, subjects in SETS.items():
        lines += [f"## {title}", "| package | version | licence |", "|---|---|---|"]
        for name in [name for subject in subjects for name in pinned_names(subject)]:
            metadata = distribution(name).metadata
            version = metadata["Version"].partition("+")[0]  # torch with CUDA or without
            licence = licence_of(metadata)  # type: ignore[arg-type]
            if not is_allowed(licence) and name not in EXCEPTIONS:
                refused.append(f"{name} {version}: {licence}")
            reason = f"; {EXCEPTIONS[name].partition(': ')[2]}" if name in EXCEPTIONS else ""
            lines.append(f"| {name} | {version} | {licence}{reason} |")
        lines.append("")
    PAGE.write_text("\n".join(lines).rstrip("\n") + "\n")
    if refused:
        sys.exit(f"not in ALLOWED and not in EXCEPTIONS of {Path(__file__).name}: {'; '.join(refused)}")


if __name__ == "__main__":
    main()
