"""The site builds from the notebooks without a warning, and what it shows is whole. `make docs`
opens it in a browser besides (docs/test_browser.py).
"""
import ast
import os
import pickle
import re
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import nbformat
import notebooks
import pytest
import site_api
import site_figures
import site_folds
import site_links
import site_pages
from docutils import nodes
from filelock import FileLock

LIMIT = 1_500_000                       # bytes of a page, with the pictures that are its own


class Tags(HTMLParser):
    """The tags of a page with their attributes, its ids, and the text that is neither code nor
    formula.
    """
    def __init__(self, html):
        super().__init__()
        self.tags, self.ids, self.text, self.within = [], set(), "", []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if attrs.get("id"): self.ids.add(attrs["id"])
        if tag in ("pre", "code", "script", "style") or "math" in (
            attrs.get("class") or "").split():
            self.within.append([tag, 0])
        elif self.within and tag == self.within[-1][0]: self.within[-1][1] += 1

    def handle_endtag(self, tag):
        if self.within and tag == self.within[-1][0]:
            if self.within[-1][1]: self.within[-1][1] -= 1
            else: self.within.pop()

    def handle_data(self, data):
        if not self.within: self.text += data


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    "The site, built once for all workers."
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site"
    with FileLock(f"{out}.lock"):
        if not (out / "llms.txt").exists():
            done = subprocess.run([sys.executable, str(notebooks.ROOT / "tools" / "site_pages.py"),
                                   "--out", str(out)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.fixture(scope="session")
def pages(built):
    "Each page of the site, read once for all workers."
    kept = built.with_name("pages")
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            read = {path.relative_to(built): Tags(path.read_text(encoding="utf-8"))
                    for path in sorted(built.rglob("*.html"))}
            kept.write_bytes(pickle.dumps(read))
    return pickle.loads(kept.read_bytes())


@pytest.fixture(scope="module")
def prepared(): return list(map(site_pages.Page, site_pages.sources()))


def test_notebooks_and_modules_without_one_are_pages_in_the_sidebar(built, pages):
    links = {a.get("href") for tag, a in pages[Path("index.html")].tags if tag == "a"
             and "internal" in (a.get("class") or "")}
    for path in site_pages.sources():
        page = site_pages.page(path).with_suffix(".html")
        assert page in pages, f"{path.name} has no page"
        assert (page.name == "index.html"
                or page.as_posix() in links), (f"{path.name} is not in the sidebar")


def test_the_floors_stand_in_order(built):
    html = (built / "index.html").read_text(encoding="utf-8")
    captions = re.findall(r"<summary>([^<]+)", html[:html.index("<article")])
    assert captions == [floor for floor in site_pages.FLOORS if floor in captions]
    assert {"Start", "Formulas", "How it is made"} <= set(captions)


def test_what_comes_next_stands_at_the_foot(built):
    html = (built / "formulas" / "kl.html").read_text(encoding="utf-8")
    foot = html[html.index("Next on <em>"):]
    assert foot.startswith('Next on <em>RLHF for practitioners</em>: <a class="reference internal" '
                           'href="grpo.html">')
    assert "ends here" in (built / "why.html").read_text(encoding="utf-8")


def test_the_front_is_a_page_and_the_readme_is_none(built):
    html = (built / "index.html").read_text(encoding="utf-8")
    heads = ("Three paths", "The loop", "Who this is for", "Use it")
    at = [html.index(f"<h2>{head}") for head in heads]
    assert at == sorted(at) and "make site" not in html and "Two commands" not in html
    readme = (notebooks.ROOT / "README.md").read_text(encoding="utf-8")
    assert "Who this is for" not in readme and "## Two commands" in readme


def test_the_sheet_has_the_card_of_each_lesson(built):
    html = (built / "sheet.html").read_text(encoding="utf-8")
    cards = sum("### The formulas by name" in p.read_text(encoding="utf-8").replace("\\n", "\n")
                for p in notebooks.notebooks())
    assert html.count('class="sheet"') == html.count('<pre class="card">') == cards >= 12
    assert '<span style="--at: 19ch">clipped_surrogate  min(r A' in html


def test_a_widget_follows_its_picture(built):
    html = (built / "start.html").read_text(encoding="utf-8")
    before, after = html.split('data-widget="bandit"')
    assert "<img" in before[-1500:] and 'src="_widgets/bandit.js"' in after


@pytest.mark.parametrize(
    "page, room",
    [("index", "Start"), ("formulas/kl", "Formulas"), ("checks", "How it is made"),
     ("exercises/check", "Exercises"), ("search", "Start")])
def test_one_room_of_the_sidebar_is_open(built, page, room):
    html = (built / f"{page}.html").read_text(encoding="utf-8")
    assert re.findall(r"<details open><summary>([^<]+)", html[:html.index("<article")]) == [room]


def test_lessons_and_paths_have_minutes(built):
    html = (built / "index.html").read_text(encoding="utf-8")
    assert re.search(r'href="formulas/surrogate.html">The clipped surrogate<', html)
    assert re.search(r"lesson 04 · \d+ minutes · <a",
                     (built / "formulas" / "surrogate.html").read_text(encoding="utf-8"))
    text = re.sub(r"<[^>]+>", "", html)
    for path in ("From nothing to CartPole", "RLHF for practitioners", "GRPO and its family"):
        total, line = re.search(rf"{path} (\d+) minutes (.*)", text).groups()
        assert int(total) == sum(map(int, re.findall(r"\((\d+)\)", line))) > 30
    rates = " and ".join(", ".join(f"{n} {what}" for what, n in site_pages.PACE.items())
                         .rsplit(", ", 1))
    assert f"computed, not clocked: what stands open on a page, at {rates} a minute" in text


def lesson(stem):
    return site_pages.Page(next(p for p in notebooks.notebooks() if p.stem == stem))


def test_minutes_count_what_is_read():
    page = lesson("start")
    def minutes(*cells):
        page.nb.cells = list(cells)
        return page.minutes
    text, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    assert minutes(text("word " * 1200)) == 10 and minutes(code("x = 1\n\n" * 75)) == 5
    pictures = [code(f"#| fig-alt: a picture\n{rest}") for rest in ("x\n" * 3, "x\n" * 900)] * 4
    assert minutes(*pictures) == round(8 / 2 + 4 * 4 / 15)
    assert minutes(text("$$a$$\n\n" * 20)) == 10
    folded = [text("word " * 600), text("### More proofs\n" + "word " * 4000),
              code("x = 1\n" * 900), text("## Next\n" + "word " * 600)]
    assert minutes(*folded, text("## Exercises\n" + "word " * 900)) == 10
    assert minutes(text("word " * 600), code("#| echo: false\n" + "x = 1\n" * 900),
                   code("#| hide\n" + "x = 1\n" * 900)) == 5


def test_no_directive_and_no_tex_is_shown(built, pages):
    for name, page in pages.items():
        html = (built / name).read_text(encoding="utf-8")
        assert not re.search(r"#\|\s*(export|hide|fig-alt|default_exp|echo|code-fold)",
                             html), f"{name} shows a directive"
        assert not (
            m := re.search(r"\$\$|\\(frac|operatorname|text|log|pi)(?![a-z])|\{py:\w+\}|\{eq\}",
                           page.text)), f"{name} shows {m[0]!r}"


def test_pages_load_nothing_from_elsewhere(built, pages):
    for name, page in pages.items():
        for tag, a in page.tags:
            loaded = [a[k] for k in ("src", "data", "poster", "srcset") if a.get(k)]
            if tag == "link" and not {"canonical", "alternate", "author", "license"} & set(
                (a.get("rel") or "").split()):
                loaded.append(a.get("href"))
            if tag in ("image", "use"): loaded.append(a.get("href") or a.get("xlink:href"))
            for url in filter(None, loaded):
                if url.startswith(("data:", "#")): continue
                assert not re.match(r"(\w+:)?//", url), f"{name} loads {url}"
                file = unquote(url.split("?")[0].split("#")[0])
                assert (built / name.parent / file).exists(), f"{name}: {url} is missing"
        styles = re.findall(
            r"@import[^;]*|url\([^)]*\)", (built / name).read_text(encoding="utf-8"))
        assert not any(
            "//" in s and "data:" not in s for s in styles), f"{name} loads a style from elsewhere"
    for css in built.rglob("*.css"):
        assert not re.search(
            r"(@import|url\()\s*['\"(]?\s*(https?:)?//",
            css.read_text(encoding="utf-8")), f"{css.name} loads something from elsewhere"


def test_every_picture_has_a_text(pages):
    for name, page in pages.items():
        for tag, a in page.tags:
            if tag == "img" and a.get("aria-hidden") != "true":
                assert len(a.get("alt")
                           or "") >= 10, (f"{name}: a picture without alternative text: "
                                          f"{a.get('src', '')[:100]}")


def test_links_within_the_site_lead_somewhere(built, pages):
    for name, page in pages.items():
        for tag, a in page.tags:
            href = a.get("href") or ""
            if tag != "a" or re.match(r"\w+:|//|#cartpole:", href) or not href: continue
            file, _, anchor = href.partition("#")
            to = Path(name.parent, file) if file else name
            to = Path(*[p for p in (built / to).resolve().relative_to(built.resolve()).parts])
            assert (built / to).exists(), f"{name}: {href} leads nowhere"
            if anchor and to in pages:
                assert unquote(anchor) in pages[
                    to].ids, f"{name}: {href} leads to a page without that place"


def test_no_page_is_heavy(built, pages):
    for name, page in pages.items():
        own = {(built / name.parent / a["src"].partition("#")[0]).resolve() for tag, a in page.tags
               if tag == "img" and not a["src"].startswith("data:")}
        weight = (built / name).stat().st_size + sum(p.stat().st_size for p in own)
        assert ((built / name).stat().st_size
                <= LIMIT), (f"{name} has {(built / name).stat().st_size / 1e6:.2f} MB")
        assert weight <= 2 * LIMIT, f"{name} has {weight / 1e6:.2f} MB with its pictures"


def test_every_public_name_has_its_place(built, pages, prepared):
    for path in (notebooks.ROOT / "rlhf_notes").rglob("*.py"):
        if path.stem.startswith("_"): continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        public = next((ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign)
                       and ast.unparse(n.targets[0]) == "__all__"), [])
        if not public: continue
        module = ".".join(path.relative_to(notebooks.ROOT).with_suffix("").parts)
        page = next(p.page for p in prepared if any(t.module == module for t in p.things)
                    or p.exports_to == module)
        defined = {n.name for n in tree.body
                   if isinstance(n, (ast.FunctionDef, ast.ClassDef))} & set(public)
        missing = [n for n in sorted(defined)
                   if f"{module}.{n}" not in pages[page.with_suffix(".html")].ids]
        assert not missing, f"{page} has no place for {missing}"


def test_signatures_come_with_their_parameters(built):
    html = (built / "formulas" / "surrogate.html").read_text(encoding="utf-8")
    entry = html[html.index('<dt class="sig sig-object py" '
                            'id="rlhf_notes.formulas.surrogate.clipped_surrogate"'):]
    entry = re.sub(r"<[^>]+>", " ", entry[:entry.index("</dl>")])
    for word in ("dual_clip", "float | None", "where A &lt; 0, no loss above c", "returns",
                 "to be maximised"):
        assert word in re.sub(r"\s+", " ", entry), word
    assert re.search(r"surrogate\.py#L\d+-L\d+", html)


def test_parameters_are_folded(built):
    "The code above shows them already."
    html = (built / "studies" / "failures.html").read_text(encoding="utf-8")
    folded = html.split('<details class="parameters"><summary>Parameters</summary>')[1:]
    assert len(folded) > 3
    assert all(
        part.index("<table") < part.index("</table>") < part.index("</details>") for part in folded)
    assert not any("<dt class=" in part[:part.index("</details>")] for part in folded)


def test_a_module_without_a_notebook_stands_open(built):
    html = (built / "training" / "runs.html").read_text(encoding="utf-8")
    assert 'class="parameters"' not in html and "mybinder" not in html
    assert "<h1>The directory of a run" in html and "<code" in html and "one indivisible" in html
    where = html[html.index('id="rlhf_notes.training.runs.write_atomically"'):]
    assert "whole or not at" in where[:where.index("</dd>")]
    # a lesson leads to it
    lesson = (built / "control" / "ppo.html").read_text(encoding="utf-8")
    for host in ("mybinder.org", "colab.research.google.com"):
        assert re.search(f"https://{host}/.*nbs/control/19_ppo.ipynb", lesson), host
    assert 'href="../training/runs.html"' in lesson


def test_lessons_papers_and_details_are_links(built, prepared):
    links, page = site_links.Links(prepared), lesson("04_surrogate")
    link = lambda text: links(text, page, site_pages.outside)
    assert link("as lesson 08 says") == "as [lesson 08](advantage.ipynb) says"
    assert link(
        "(Ziegler et al., 2019)") == "([Ziegler et al., 2019](https://arxiv.org/abs/1909.08593))"
    assert link("Yu et al. (2025)") == "[Yu et al. (2025)](https://arxiv.org/abs/2503.14476)"
    assert re.fullmatch(r'detail <a title="[^"]{20,}" href="../language/loop.html#detail-p9">'
                        "P9</a>", link("detail P9"))
    for left in ("lesson 99", "[lesson 04](x)", "$P_1, P1$", "`G4`", "```\nP9\n```", "# P9", "P99",
                 "DeepSeek-R1", "Nobody et al. 2019"):
        assert link(left) == left
    told = (built / "studies" / "failures.html").read_text(encoding="utf-8")
    assert told.count('<a title="') > 30 and not re.search(r'<a title="[^"]*(&lt;|\\)', told)
    assert site_links.codes("R1 to R4") == ["R1", "R2", "R3", "R4"]
    assert site_links.codes("G2, P3") == ["G2", "P3"]
    assert 'id="detail-r3"' in (built / "language" / "loop.html").read_text(encoding="utf-8")


def test_imports_are_one_fold(built):
    page = (built / "formulas" / "surrogate.html").read_text(encoding="utf-8")
    assert page.count('<p class="collapsed admonition-title">Imports<') == 1


def test_sentences_are_wrapped_and_columns_are_not(built):
    def printed(text):
        return nbformat.v4.new_code_cell(
            "print()", outputs=[nbformat.v4.new_output("stream", name="stdout", text=text)])
    assert site_pages.prints_sentences(printed("a word " * 20))
    assert site_pages.prints_sentences(printed("short\n" + "two, " * 30))
    assert not site_pages.prints_sentences(printed("a word " * 17))
    assert not site_pages.prints_sentences(printed("name      1.0 " * 12))
    assert "tag_sentences" in (built / "studies" / "failures.html").read_text(encoding="utf-8")


def test_backticks_are_links_where_they_name_something(prepared):
    page = lesson("04_surrogate")
    names = site_api.Names([t for p in prepared for t in p.things])
    refer = lambda text: page.references(text, names)
    assert refer("see `whiten`.") == "see {py:obj}`~rlhf_notes.formulas.whitening.whiten`."
    assert "advantage.gae`" in refer("`gae()`") and "RewardNorm.fit>`" in refer("`RewardNorm.fit`")
    for left in ("```python\n`whiten`\n```", "# `whiten`", "[`whiten`](x)", "`train`", "`mask`",
                 "`float32`", "`whiten(x)`", "``a `whiten` b``", "`compare`"):
        assert refer(left) == left, left


def test_every_option_has_its_meaning():
    page = lesson("21_config")
    params = {name: comment for t in page.things if t.name in ("LoopConfig", "RLHFConfig")
              for name, *_, comment in t.params}
    assert params["lr_warmup"].startswith("iterations") and len(params) > 30
    assert all(params.values()), params


def test_formulas_are_numbered_and_labels_kept():
    page = lesson("04_surrogate")
    text = page.numbered(
        "$$a$$\n\n```text\n$$b$$\n```\n\n$$c\\\\\nd$$ (eq-d)\n\nsee [it](#eq-d) and $e$\n\n$$f$$")
    assert (text == "$$a$$ (surrogate-1)\n\n```text\n$$b$$\n```\n\n$$c\\\\\nd$$ "
            "(eq-d)\n\nsee {eq}`eq-d` and $e$\n\n$$f$$ (surrogate-3)")


def test_formulas_have_a_number_and_a_place(built, pages):
    for path in notebooks.notebooks():
        page = site_pages.page(path).with_suffix(".html")
        shown = re.findall(r'class="eqno">\((\d+)\)', (built / page).read_text(encoding="utf-8"))
        assert [int(n) for n in shown] == list(range(1, len(shown) + 1)), f"{page}: {shown}"
        assert sum(i.startswith("equation-") for i in pages[page].ids) == len(shown)
    assert "equation-surrogate-1" in pages[Path("formulas/surrogate.html")].ids


def test_folds(tmp_path):
    page = lesson("04_surrogate")
    def shown(source, intro=False):
        cell = nbformat.v4.new_code_cell(source)
        return page.cell(cell, notebooks.directives(source), site_api.Names([]), intro)
    solution = shown("#| code-fold: true\n#| code-summary: Solution\nx = 1")
    assert solution.source == "x = 1"
    assert solution.metadata["tags"] == ["hide-input"]
    assert solution.metadata["mystnb"]["code_prompt_show"] == "Solution"
    assert shown("#| echo: false\nx = 1").metadata["tags"] == ["remove-input"]
    assert shown("x = 1").metadata["tags"] == []
    assert shown("import torch", intro=True).metadata["tags"] == ["hide-input"]
    assert shown("import torch").metadata["tags"] == []
    assert shown("#| fig-alt: what is seen\nplot()").metadata["mystnb"]["image"][
        "alt"] == "what is seen"


def doctree(text):
    """What docutils makes of the blocks of `text`, one a line: # heading, > code, output or none
    (*.svg is a picture), < HTML, or a paragraph.
    """
    root = section = nodes.section("", nodes.title("", "A page"))
    for line in text.split("\n"):
        if line.startswith("# "): root += (section := nodes.section("", nodes.title("", line[2:])))
        elif line.startswith("> "): section += code(*line[2:].split(" -> "))
        elif line.startswith("< "): section += nodes.raw("", line[2:], format="html")
        else: section += nodes.paragraph("", line)
    return root


def put_out(output):
    if output.endswith(".svg"): return nodes.image(output, alt=output)
    return nodes.raw("", output, format="html")


def code(source, output=None):
    parts = [nodes.container("", nodes.literal_block("", source), nb_element="cell_code_source")]
    if output:
        parts.append(nodes.container("", *map(put_out, output.split(", ")),
                                     nb_element="cell_code_output"))
    return nodes.container("", *parts, nb_element="cell_code")


@pytest.mark.parametrize("text, kept, folded", [
    ("**Predict.** What?\n> f() -> 3\nThree.\nMore.", "What? f() More.", "3 Three."),
    ("Predict before you run. What?\n> f()\n> g() -> 3\n# Next\nMore.", "What? f() g() Next More.",
     "3"),
    ("Predict before you run: what?\nWait.\n# Next\n> f() -> 3\nThree.",
     "what? Wait. Next f() 3 Three.", ""),
    ("Predict before you run: what?\nWait.\n> f() -> 3\nThree, as the formula:",
     "what? Wait. f() formula:", "3"),
    ("Predict before you move it. What?\n> f() -> <i data-slider>\nThree.", "What? f() data-slider",
     "Three."),
    ("Predict before you run. What?\n> f() -> 3\n< data-widget\nThree.", "What? f() data-widget",
     "3 Three."),
    ("He will predict. What?\n> f() -> 3\nThree.", "What? f() 3 Three.", ""),
    ("# More proofs\nAll of it.\n> f() -> 3\n# Next\nMore.", "proofs Next More.", "All f() 3"),
])
def test_what_is_folded(text, kept, folded):
    page = doctree(text.replace("**", ""))
    site_folds.fold(None, page, "page")
    words = " ".join(n.astext() for n in page.findall(nodes.Text))
    closed = " ".join(re.findall(r"</summary>(.*?)</details>", words))
    for word in folded.split(): assert word in closed, words
    for word in kept.split(): assert word in re.sub(r"</summary>.*?</details>", "", words), words


@pytest.mark.parametrize("text, order", [
    ("Predict before you run. What?\n> f() -> 3, a.svg\n> g() -> b.svg\nThree.",
     "What? f() g() <details 3 a.svg b.svg Three. </details>"),
    ("Predict before you run. What?\n> f() -> a.svg\n# Next",
     "What? f() <details a.svg </details> Next"),
    ("Predict before you run. What?\n> f() -> 3, a.svg\n< data-widget\nThree.",
     "What? f() <details 3 Three. </details> a.svg data-widget"),
    ("Predict before you run. What?\n> f() -> a.svg\nNow another.\n> g() -> b.svg",
     "What? f() <details a.svg </details> Now another. g() b.svg"),
])
def test_the_pictures_that_answer_are_covered(text, order):
    page = doctree(text)
    site_folds.fold(None, page, "page")
    shown = [n for n in page.findall() if isinstance(n, (nodes.Text, nodes.image))]
    words = " ".join(n.astext() for n in shown)
    at = [words.index(word) for word in order.split()]
    assert at == sorted(at) and words.count(".svg") == order.count(".svg"), words
    assert words.count("<details") == order.count("<details")


def test_the_site_has_pictures_that_are_covered(built):
    parts = [part[:part.index("</details>")] for page in built.rglob("*.html") for part in
             page.read_text(encoding="utf-8").split('<details class="fold answer covered">')[1:]]
    assert len(parts) > 50 and all("<img" in part for part in parts)


def test_the_foot_of_a_page_stays_out_of_its_last_fold():
    page = doctree("# Exercises\nOne.")
    page[-1] += nodes.container("", nodes.paragraph("", "Next."), classes=["next-on-path"])
    site_folds.fold(None, page, "page")
    words = " ".join(n.astext() for n in page.findall(nodes.Text))
    assert words.index("One.") < words.index("</details>") < words.index("Next.")


def test_nine_answers_of_ten_are_folded(built):
    pages = [p.read_text(encoding="utf-8") for p in built.rglob("*.html")]
    asked = sum(len(re.findall(r"<strong>Predict\b", p)) for p in pages)
    assert 100 < asked
    assert 0.9 * asked < sum(p.count('<details class="fold answer') for p in pages)


def test_programs_find_every_page(built):
    lines = (built / "llms.txt").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ") and lines[2].startswith("> ")
    entries = dict(re.match(r"- \[.+?\]\((.+?)\): (.+)", line).groups() for line in lines
                   if line.startswith("- "))
    pages = {site_pages.page(p).with_suffix(".html").as_posix()
             for p in site_pages.sources()} - {"index.html"}
    assert set(entries) == pages and all(len(words) > 40 for words in entries.values())
    assert "clipped_surrogate" in entries["formulas/surrogate.html"]
    whole = (built / "llms-full.txt").read_text(encoding="utf-8")
    assert "def clipped_surrogate(" in whole and "def write_atomically(" in whole


def test_a_docstring_leads_to_its_page(built, prepared):
    for page in prepared:
        if page.is_module: continue
        markdown = f"{page.page.as_posix()}.html.md"
        # the site's front page speaks to people, the README names the package
        title = "How machines learn from rewards" if page.page.name == "index" else page.title
        assert (built / markdown).read_text(encoding="utf-8").startswith(f"# {title}\n")
        if module := page.exports_to:
            text = ast.get_docstring(
                ast.parse((notebooks.ROOT
                           / site_api.module_file(module)).read_text(encoding="utf-8")))
            assert text.endswith(f"Docs: {notebooks.NBDEV.doc_url}{markdown}"), module


def test_a_page_for_programs_leads_to_others(built):
    for page in built.rglob("*.html.md"):
        text = re.sub(r"(````?)python.*?\1", "", page.read_text(encoding="utf-8"), flags=re.S)
        links = re.findall(r"\]\(([^()\s:#]+\.(?:ipynb|html\.md))", text)
        assert not [x for x in links if not (page.parent / x).exists()], page.name


def test_search_knows_words_and_names(built):
    index = (built / "searchindex.js").read_text(encoding="utf-8")
    search = (built / "search.html").read_text(encoding="utf-8")
    assert '"advantage": "formulas/advantage"' in search
    assert "Take the smallest case: three actions" in search
    assert "clipped_surrogate" in index
    assert '"formulas/surrogate"' in index
    assert '"why.html#how-many-generations-do-i-need", "How many generations do I need?"' in search
    assert re.search(r"\bdual\b", index)


def drawing(*axes, unlabelled=()):
    """An SVG of 100 by 40 points with axes from x to x; those of `unlabelled` have no numbers at
    their vertical ticks.
    """
    def group(i, left, right):
        text = "" if i in unlabelled else f'<g id="text_{i}"></g>'
        return (
            f'<g id="axes_{i}">\n<g id="patch_{i}">\n<path d="M {left} 30 \nL '
            f'{right} 30 \nL {right} 5 \nz"/></g>'
            f'<g id="ytick_1">{text}</g><g id="ytick_2">{text}</g><g ' f'id="text_title"></g></g>')
    return '<svg viewBox="0 0 100 40">' + "".join(
        group(i, *a) for i, a in enumerate(axes)) + "</svg>"


def test_figures_are_cut_between_their_axes():
    two = (10, 40), (60, 95)
    assert site_figures.panels(drawing(*two)) == [[(0, 0, 44, 40)], [(44, 0, 56, 40)]]
    # one axes below both
    assert site_figures.panels(drawing(*two, (10, 95))) == [[(0, 0, 100, 40)]]
    # two rows of two
    assert site_figures.panels(drawing(*two, *two)) == site_figures.panels(drawing(*two))
    # a colour bar
    assert site_figures.panels(drawing(*two, (96, 99))) == [[(0, 0, 44, 40)], [(44, 0, 56, 40)]]


def test_labels_that_panels_share_stand_before_each():
    assert site_figures.panels(drawing((10, 40), (60, 95), unlabelled={1})) == [
        [(0, 0, 44, 40)], [(0, 0, 6, 40), (44, 0, 56, 40)]]


def test_words_across_all_panels_become_lines():
    def words(text, y):
        return (f'\n  <g id="text_9">\n   <!-- {text} -->\n   <g style="" '
                f'transform="translate(9 {y}) scale(0.03 -0.03)">')
    svg = drawing((10, 40), (60, 95)).replace("</svg>", words("a & b", 3) + words("time", 39))
    assert site_figures.across(svg) == (["a & b"], ["time"], 4, 36)
    assert site_figures.panels(svg) == [[(0, 4, 44, 32)], [(44, 4, 56, 32)]]
    shown = site_figures.stacked("", "a.svg", site_figures.panels(svg), ["a & b"], ["time"])
    assert "<p>a &amp; b</p><div" in shown and shown.endswith("<p>time</p></div>")
    assert site_figures.across(drawing((10, 40), (60, 95)))[:2] == ([], [])


def test_the_frames_of_a_film_stay_side_by_side():
    picture = '<img alt="film" src="_images/a.svg" />'
    def shown(frames):
        context = {"body": picture}
        with tempfile.TemporaryDirectory() as folder:
            film = drawing(*((10 + 40 * i, 45 + 40 * i) for i in range(frames)))
            film = film.replace("0 0 100", f"0 0 {20 + 40 * frames}")
            Path(folder, "a.svg").write_text(film, encoding="utf-8")
            app = SimpleNamespace(srcdir=folder, builder=SimpleNamespace(images={"a.svg": "a.svg"}))
            site_figures.stack(app, "page", "page.html", context, None)
        return context["body"]
    assert shown(6).count("svgView") == 6
    assert 'class="narrow"' in shown(7)
    assert "svgView" not in shown(7)


def test_panels_are_parts_of_their_figure(built):
    html = (built / "formulas" / "surrogate.html").read_text(encoding="utf-8")
    for whole, parts in re.findall(
        r'src="([^"]*\.svg)"[^>]*><div class="panels"[^>]*>(.*?)</div></div>', html):
        assert {src.partition("#")[0] for src in re.findall(r'src="([^"]*)"', parts)} == {whole}
    assert html.count('class="panels"') >= 3
