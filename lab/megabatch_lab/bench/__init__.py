"""Benchmarks against peers: `megabatch bench NAME` runs the file of that name, from a checkout."""
