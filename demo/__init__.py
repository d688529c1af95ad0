"""The demo: a table and an index follow a cluster that is written to, killed and moved, and what came of it."""
