"""UPR and DCP on a node: stream connections of both roles, and the engine as their source and sink."""
