"""Benchmarks, fault injection, fuzzing, studies and the fake CUDA.  Imports megabatch, never the reverse."""
