"""Programs that write parts of the source."""
