"""Benchmarks, printed as ratios within one run."""
