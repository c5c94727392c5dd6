"""The type of objects in JSON data, and the errors that invalid data can raise."""

from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
"""An object in JSON data that this package reads or writes, such as a config or an evaluation."""

INVALID_JSON = (ValueError, TypeError, OverflowError, RecursionError)
"""The errors that parsing JSON and converting its values can raise, except for missing keys."""
