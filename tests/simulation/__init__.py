"""Whole clusters in one thread, ordered by one seeded scheduler: docs/simulation.md."""
