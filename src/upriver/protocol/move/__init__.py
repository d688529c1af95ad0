"""The mover: the steps that move or replicate vbuckets between two nodes, and the relay between their connections."""
