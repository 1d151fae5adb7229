"""The browser that docs/test_browser.py needs: without one there is one line that says so, and nothing is run."""
import os
import shutil
from pathlib import Path

import pytest

os.environ.setdefault("SITE", str(Path(__file__).resolve().parent.parent / "_docs"))
BROWSERS = [os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome", "chrome"]
CHROMIUM = next((path for name in BROWSERS if name and (path := shutil.which(name))), None)


def pytest_configure():
    if CHROMIUM is None: pytest.exit("no Chromium found: install the package chromium, or set CHROMIUM to the path of a Chromium or Chrome", 1)
    site = Path(os.environ["SITE"])
    if not (site / "index.html").exists(): pytest.exit(f"no site in {site}: build it with `make site`", 1)


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"])
        yield browser
        browser.close()
