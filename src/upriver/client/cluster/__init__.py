"""Which node owns which vbucket: the cluster map, its updates, and questions to single nodes."""
