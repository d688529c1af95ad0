"""Which bucket a data directory holds: its name, and the uuid by which clients know it again after a restart."""

import json
import secrets
from pathlib import Path
from typing import Final

from upriver.errors import StorageError
from upriver.files import storage_errors, write_atomically

#: Where the data directory keeps it.
BUCKET_FILE: Final = "bucket.json"


def bucket_uuid(data: Path | None, name: str) -> str:
    """The uuid of the bucket of this name; ``StorageError`` if the directory holds another one."""
    fresh = secrets.token_hex(16)
    if data is None:
        return fresh
    path = data / BUCKET_FILE
    try:
        with storage_errors(path):
            if not path.exists():
                write_atomically(path, json.dumps({"name": name, "uuid": fresh}).encode())
                return fresh
            kept = json.loads(path.read_bytes())
        kept_name, kept_uuid = kept["name"], kept["uuid"]
    except (ValueError, KeyError, TypeError):
        raise StorageError(str(path), "it does not name a bucket; remove it to give the data a new identity") from None
    if kept_name != name:
        raise StorageError(str(data), f"it holds the bucket {kept_name!r}, not {name!r}: say --bucket {kept_name}")
    return str(kept_uuid)
