"""Sphinx settings of the site. `make site` prepares the notebooks (tools/site_pages.py) and builds from them."""
import posixpath
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import site_api
from notebooks import NBDEV, settings

cfg = settings()
project, author, copyright, release = NBDEV.title, cfg["author"], cfg["copyright"], NBDEV.version
extensions = ["myst_nb", "sphinx_copybutton", "sphinx.ext.linkcode", "site_figures", "site_folds", "site_search"]
nitpicky = True                         # a reference that leads nowhere is a warning, and a warning fails the build
nb_execution_mode = "off"
nb_render_markdown_format = "myst"      # outputs may hold formulas and links too
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist"]
myst_heading_anchors = 4

add_module_names = False
toc_object_entries_show_parents = "hide"
def linkcode_resolve(domain, info): return site_api.source_url(info["module"], info["fullname"])

mathjax_path = "mathjax/tex-svg-full.js"            # MathJax 3.2.2, kept here: the site reads without a network
mathjax3_config = {"svg": {"fontCache": "local"}, "options": {"enableMenu": False}}

html_theme = "furo"
html_title = project
html_static_path = ["static"]
html_favicon = "static/favicon.svg"
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_show_search_summary = False        # it is fetched, which a browser refuses to do for file://; static/search.js has another
html_theme_options = {"top_of_page_buttons": [], "footer_icons": []}
copybutton_exclude = ".linenos, .gp, .go"


def rooms(tree):
    "The sidebar with a fold for each room; open is the one of this page, or the first."
    tree = re.sub(r'<p class="caption".*?<span class="caption-text">(.*?)</span></p>\s*(<ul.*?</ul>)', r"<details><summary>\1</summary>\n\2</details>", tree, flags=re.S)
    here = tree.find('current-page')
    at = tree.rfind("<details", 0, here) if here > 0 else tree.find("<details")
    return tree[:at] + tree[at:].replace("<details", "<details open", 1)


def accessible(app, pagename, templatename, context, doctree):
    "A sidebar that folds, and a name for the theme's folds."
    if "furo_navigation_tree" in context: context["furo_navigation_tree"] = rooms(context["furo_navigation_tree"])
    if "body" in context: context["body"] = context["body"].replace('<summary aria-label="Toggle hidden content">', "<summary>")


SIDEBARS = {}                           # folder -> the sidebar of its pages, none of them the current one
LINK = '<li class="toctree-l1{}"><a class="{}reference internal" href="{}">'


def sidebar(app, pagename, templatename, context, doctree):
    "The theme's tree of all pages, made once for each folder: the links of its pages differ in the current one alone."
    folder, page = posixpath.split(pagename)
    here, other = LINK.format(" current", "current ", "#"), LINK.format("", "", f"{page}.html")
    make = context["toctree"]

    def tree(**options):
        if folder not in SIDEBARS:
            SIDEBARS[folder] = make(**options).replace(here, other).replace('<ul class="current">', "<ul>")
        before, link, after = SIDEBARS[folder].partition(other)
        if not link: return before
        start, ul, rest = before.rpartition("<ul>")
        return f'{start}<ul class="current">{rest}{here}{after}'
    context["toctree"] = tree


def setup(app):
    app.connect("html-page-context", sidebar, priority=400)
    app.connect("html-page-context", accessible, priority=900)
