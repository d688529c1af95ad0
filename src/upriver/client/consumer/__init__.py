"""The consumer of change streams: feeds, positions, batches, checkpoints, and who keeps the streams going."""
