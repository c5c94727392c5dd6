"""Test that printed tables show the full text of every cell. Test how durations are formatted."""

import pytest

from transformer_jax.commands.tables import format_duration, print_table
from transformer_jax.console import stdout


@pytest.mark.parametrize(
    ("hours", "text"), [(0.2, "12 min"), (48, "48 h 00 min"), (49, "2.0 days"), (1140, "47.5 days")]
)
def test_a_duration_above_48_hours_is_in_days(hours: float, text: str) -> None:
    assert format_duration(hours * 3600) == text


@pytest.mark.parametrize("width", [10, 40, 200])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_printed_table_shows_all_text_in_any_width(
    width: int,
    is_terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(stdout, "_width", width)
    monkeypatch.setattr(stdout, "_force_terminal", is_terminal)
    cells = ["Self-Attention (restricted)", "long/path" * 10, "4,294,967,296 FLOPs", "1.5"]
    print_table([["layer", "path", "complexity", "ms"], cells])
    text = capsys.readouterr().out
    assert "4,294,967,296 FLOPs  1.5" in text
    assert all("".join(text.split()).count(word) == 1 for word in cells[0].split())
    assert "  ".join(cells) in text or (is_terminal and width != 200)
