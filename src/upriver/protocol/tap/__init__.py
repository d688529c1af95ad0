"""Both sides of TAP: connects, acknowledgements, checkpoints, takeovers, and clients that come back by name."""
