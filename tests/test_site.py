"""The site builds from the notebooks without a warning, and what it shows is whole."""
import re
import subprocess
import sys

import pytest

import notebooks
import site_pages


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, str(notebooks.ROOT / "tools" / "site_pages.py"), "--out", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def test_every_notebook_is_a_page(built):
    for path in notebooks.notebooks():
        assert (built / site_pages.page(path)).with_suffix(".html").exists(), f"{path.name} has no page"


def test_pages_are_whole(built):
    for path in built.rglob("*.html"):
        html = path.read_text(encoding="utf-8")
        assert not re.search(r"#\|\s*(export|hide|fig-alt|default_exp)", html), f"{path.name} shows a directive"
        for src in re.findall(r'<img[^>]*src="([^"]+)"', html):
            assert src.startswith(("http", "data:")) or (path.parent / src).exists(), f"{path.name}: {src} is missing"
        for img in re.findall(r"<img[^>]*>", html):
            assert re.search(r'alt="[^"]{10,}"', img), f"{path.name}: a picture without alternative text: {img[:200]}"
