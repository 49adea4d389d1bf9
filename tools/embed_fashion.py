"""Write the embedded data set: the first 1,000 training and 200 test images of each class of Fashion-MNIST.

    python tools/embed_fashion.py        needs the Debian package dataset-fashion-mnist

The images stay in the order of the original files, so the subset is a fixed function of them.
"""

from pathlib import Path

import numpy as np

from megabatch.data.catalog import FASHION_CLASSES, FASHION_MNIST
from megabatch.data.sources.arrays import read_idx_folder

PER_CLASS = {"train": 1000, "test": 200}
OUT = Path(__file__).parents[1] / "src/megabatch/data/embedded/fashion_mnist_10k.npz"


def first_of_each_class(labels: np.ndarray, per_class: int) -> np.ndarray:
    """Return the indices of the first `per_class` samples of every class, ascending."""
    chosen = [np.flatnonzero(labels == label)[:per_class] for label in np.unique(labels)]
    return np.sort(np.concatenate(chosen))


def subset() -> dict[str, np.ndarray]:
    full = read_idx_folder(FASHION_MNIST)
    arrays = {}
    for part, per_class in PER_CLASS.items():
        images, labels = full[f"{part}_images"], full[f"{part}_labels"]
        chosen = first_of_each_class(labels, per_class)
        arrays[f"{part}_images"], arrays[f"{part}_labels"] = images[chosen], labels[chosen].astype(np.uint8)
    arrays["class_names"] = np.array(FASHION_CLASSES)
    return arrays


if __name__ == "__main__":
    np.savez_compressed(OUT, allow_pickle=False, **subset())
    print(f"{OUT.name}: {OUT.stat().st_size / 1e6:.1f} MB")
