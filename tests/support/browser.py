"""Start Chromium with Playwright. Without both, the tests that import this module are skipped."""

import shutil
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("needs chromium", allow_module_level=True)
playwright_api = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright: pip install --group browser"
)


def launch(playwright: Any) -> Any:
    """Start Chromium, which takes several seconds."""
    return playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
