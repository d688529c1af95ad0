"""HTTP beside the data port: metrics and health."""
