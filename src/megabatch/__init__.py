"""megabatch: image classifiers trained with huge batches, as fast as the cluster can go."""

__version__ = "0.1.0"
