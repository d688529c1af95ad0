def lay_out(
    records: bytes,
    at: int,
    opaque: int,
    count_max: int,
    flags: int,
    since: int,
    since_upto: int,
    ttl_min: int,
    ack: int,
) -> tuple[bytes, int, int, int, int, bool]: ...
