"""The type of JSON objects, and a function that reads possibly invalid JSON files."""

import contextlib
import json
from pathlib import Path
from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object that this package reads or writes, such as a config or an evaluation."""

INVALID_JSON = (ValueError, TypeError, OverflowError, RecursionError)
"""The exceptions that parsing JSON and converting its values can raise, except for KeyError."""

# The maximum size of a JSON file in bytes. A larger file may be malicious, so `read_json_object`
# does not read it.
MAX_JSON_BYTES = 16 << 20


def read_json_object(path: Path) -> JsonObject:
    """Return the object in a JSON file, or {} if the file is missing, too large, or invalid."""
    with contextlib.suppress(OSError, *INVALID_JSON):
        if path.stat().st_size <= MAX_JSON_BYTES:
            content = json.loads(path.read_bytes())
            if isinstance(content, dict):
                return content
    return {}
