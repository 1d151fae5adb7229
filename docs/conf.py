"""Sphinx settings of the site. `make docs` prepares the notebooks (tools/site_pages.py) and builds from them."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from notebooks import settings

cfg = settings()
project, author, copyright, release = cfg["title"], cfg["author"], cfg["copyright"], cfg["version"]
extensions = ["myst_nb", "sphinx_copybutton"]
nb_execution_mode = "off"
nb_render_markdown_format = "myst"      # outputs may hold formulas and links too
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = project
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_theme_options = {
    "source_repository": cfg["git_url"],
    "source_branch": cfg["branch"],
    "footer_icons": [],
}
copybutton_exclude = ".linenos, .gp, .go"
