"""The demo: a table and an index follow a cluster while it is written to, killed and moved; then all are compared."""
