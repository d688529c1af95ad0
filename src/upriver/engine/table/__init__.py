"""The item table of a vbucket: records in chunks, an index by key, and the order of changes."""
