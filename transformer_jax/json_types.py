"""The type of objects in JSON data."""

from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
"""An object in JSON data that this package reads or writes, such as a config or an evaluation."""
