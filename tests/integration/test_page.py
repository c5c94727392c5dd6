"""Test that the page of a report fits on a phone and is readable in both color schemes."""

from pathlib import Path

import pytest
from browser import launch, playwright_api
from run_files import collect, make_finished_sweep

from transformer_jax.reports.report import write_report

pytestmark = pytest.mark.slow


def test_the_page_fits_and_follows_the_color_scheme(tmp_path: Path) -> None:
    page_file = write_report(collect(make_finished_sweep(tmp_path / "s"))) / "index.html"
    colors = set()
    with playwright_api.sync_playwright() as playwright:
        browser = launch(playwright)
        for width in (390, 1280):
            for scheme in ("light", "dark"):
                size = {"width": width, "height": 800}
                page = browser.new_page(viewport=size, color_scheme=scheme)
                page.goto(page_file.as_uri())
                # The page shows the answers and hides the tables in collapsed sections.
                assert page.locator("h2, dt, figure").first.is_visible()
                assert not page.locator("table").first.is_visible()
                page.evaluate("document.querySelectorAll('details').forEach(x => x.open = true)")
                assert page.locator("table").first.is_visible()
                assert page.evaluate("document.documentElement.scrollWidth") == width
                # Everything in a figure is inside its borders.
                assert page.evaluate(
                    "[...document.querySelectorAll('svg text')].every(text => {"
                    "const a = text.getBoundingClientRect(), b = text.closest('svg')"
                    ".getBoundingClientRect(); return a.left >= b.left - 1 && "
                    "a.right <= b.right + 1 && a.bottom <= b.bottom + 1})"
                )
                colors.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
                page.close()
        browser.close()
    assert len(colors) == 2
