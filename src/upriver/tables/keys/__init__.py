"""Hashes of keys: compiled loops with a plain twin, sorting larger than memory, and the list of a task's keys."""
