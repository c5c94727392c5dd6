import re
from typing import Any

import numpy as np
import pytest

from transformer_jax.errors import UsageError
from transformer_jax.visualization.attention_views import Selection


def test_indices_count_from_zero_and_negative_ones_from_the_end() -> None:
    selection = Selection(layer=-2, heads=[-1, 0, 2], position=np.int64(-4))
    resolved = selection.resolve(6, 3, 4)
    assert (resolved.layer, resolved.heads, resolved.position) == (4, (0, 2), 0)


def test_a_numpy_array_selects_heads() -> None:
    least_important = np.argsort([3.0, 0.0, 2.0, 1.0])[:3]
    assert Selection(heads=least_important).resolve(6, 4, 4).heads == (1, 2, 3)
    assert Selection(heads=np.array([0])).resolve(6, 4, 4).heads == (0,)


def test_by_default_the_last_layer_and_all_heads_are_selected() -> None:
    resolved = Selection().resolve(6, 3, 4)
    assert (resolved.layer, resolved.heads, resolved.position) == (5, (0, 1, 2), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer": 6}, "layer 6 does not exist: choose one from 0 to 5, or from -6 to -1"),
        ({"layer": -7}, "layer -7 does not exist"),
        ({"heads": [0, 3]}, "head 3 does not exist: choose one from 0 to 2"),
        ({"heads": []}, "no head is selected: name at least one"),
        ({"heads": np.array([], int)}, "no head is selected: name at least one"),
        ({"position": 4}, "position 4 does not exist: choose one from 0 to 3"),
        ({"kind": "crosss"}, "got 'crosss'; did you mean 'cross'?"),
        ({"view": "heat"}, "view must be one of heads, grid, alignment, got 'heat'"),
    ],
)
def test_an_unknown_selection_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        Selection(**changes).resolve(6, 3, 4)
