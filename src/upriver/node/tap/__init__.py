"""TAP on a node: connections, named clients and their keep-alive, and the engine as a sink."""
