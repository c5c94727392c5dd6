"""Test the experiments with learning rates by width."""

import pytest

from experiments import width
from experiments.width import check_table, main


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


@pytest.mark.slow
def test_both_rules_have_the_same_losses_at_the_base_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"SWEEP_STEPS": 10, "LAST_STEPS": 2, "RATES": (2.0**-13, 2.0**-5)}.items():
        monkeypatch.setattr(width, name, value)
    monkeypatch.setattr("sys.argv", ["width", "--rates", "--widths", "32"])
    main()
    lines = capsys.readouterr().out.splitlines()
    header, _, paper, base = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert header == ["rule", "width", "2^-13", "2^-5", "best"]
    assert paper[1:] == base[1:]
    # With the low rate, the loss hardly changes from its initial value.
    assert float(paper[3]) < float(paper[2])
    assert paper[4] == "2^-5"


@pytest.mark.parametrize("options", [["--seeds", "0"], ["--widths", "32", "2"], ["--widths", "6"]])
def test_invalid_numbers_are_rejected(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["width", *options])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "must be" in capsys.readouterr().err
