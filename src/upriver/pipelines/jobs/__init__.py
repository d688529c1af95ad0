"""The pipelines themselves: mirror, index, invalidate, replicate, observe and transition."""
