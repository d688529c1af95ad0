from collections import Counter

from upriver.engine.table import Ledger, Table
from upriver.wire.layout import Buffer

class FastPath:
    def __init__(self, tables: list[Table | None], ledger: Ledger, operations: Counter[str]) -> None: ...
    @property
    def room_bytes(self) -> int: ...
    def serve(
        self,
        data: Buffer,
        start: int,
        end: int,
        may_read: bool,
        may_write: bool,
        datatypes: int,
        tokens: bool,
        body_bytes_max: int,
        answer_bytes_max: int,
    ) -> tuple[int, bytes]: ...
