"""A feed without a connection, for tests of what a policy asks of one."""


class FakeFeed:
    """Stands in for a feed and for its connection, and records the streams that it must close."""

    def __init__(self, *, speaks_dcp: bool = True, is_upriver_node: bool = True, is_draft: bool = False) -> None:
        self.connection = self
        self.speaks_dcp = speaks_dcp
        self.is_upriver_node = is_upriver_node
        self.is_draft = is_draft
        self.closed: list[int] = []

    def close_stream(self, vbucket: int) -> None:
        self.closed.append(vbucket)
