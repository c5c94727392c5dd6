"""Test the coordinate check of learning rates by width."""

import pytest

from experiments.width import check_table


@pytest.mark.exhaustive
def test_changes_grow_with_the_width_except_with_a_base_width() -> None:
    _, *rows = check_table([32, 256])
    values = [[float(cell) for cell in row[2:]] for row in rows]
    narrow, one_rate, *_ = values
    _, _, narrow_paper, paper, narrow_base, base = values
    assert narrow == narrow_paper == narrow_base
    for first, *wide in zip(narrow, one_rate, paper, base, strict=True):
        growth = [x / first for x in wide]
        assert growth[0] > 3
        assert growth[1] > 2
        assert 0.5 < growth[2] < 1.5
