"""What a batch of changes does to a target: which rows it writes, and what a rollback repairs."""
