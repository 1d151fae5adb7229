"""Build the site: notebooks as they stand, with their stored outputs, to static pages in _docs.

    python tools/site_pages.py [--out _docs]

Nothing is executed. What is for tools only (`#| hide`, `#| default_exp`, the directive lines) is
left out, notebooks lose their numbers, a figure's `#| fig-alt:` becomes its alternative text, and
`#| widget: NAME` puts a widget of docs/widgets in the place of the figure. What a cell exports
stands below it with a table of its parameters; its name in backticks, on any page, is a link to it.
Formulas on lines of their own are numbered. `llms.txt` and `llms-full.txt` are the same for readers
that are programs. Any warning of Sphinx fails the build.
"""
import argparse
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from urllib.parse import urlencode

import nbformat
import site_api
import site_folds
import site_links
import site_paths
import site_widgets
from notebooks import NBDEV, ROOT, WIDTH, directives, modules, notebooks
from sphinx.cmd.build import main as sphinx

FLOORS = {"Start": ".", "Formulas": "formulas", "CartPole and Pendulum": "control",
          "Language models": "language", "Your own model and task": "hub",
          "The world of reviews": "reviews", "Measured": "studies", "Exercises": "exercises/check",
          "With TRL and verl": "bridges", "Losses of other libraries": "compat",
          "How it is made": "."}
PACE = {"words": 120, "lines of code": 15, "formulas": 2, "pictures": 2}  # a minute
# Of their floors: what a reader looks for.
FIRST = ("start", "rlhf", "ladder", "why", "settings", "metrics", "words", "notation", "map",
         "course", "cli", "runs", "check", "devices")
WORKSHOP = ("checks", "fast", "training", "exercises", "viz", "cli", "launch", "identify")
LEAVES = "On the way to CartPole"        # from there on a lesson is not for the first path
LINES = 9                               # code of a picture that is longer is folded
FENCED = re.compile(r"^([ \t]*)(`{3,}|~{3,}).*?^[ \t]*\2[`~]*[ \t]*$", re.M | re.S)


def page(path):
    """Where the notebook or module at `path` stands on the site, without suffix:
    nbs/formulas/01_masking.ipynb -> formulas/masking, rlhf_notes/cli.py -> cli.
    """
    relative = path.relative_to(ROOT / ("rlhf_notes" if path.suffix == ".py" else "nbs"))
    return relative.with_name(re.sub(r"^\d+_", "", relative.stem))


def repository(path):
    return f"{NBDEV.git_url}/blob/{NBDEV.branch}/{path.relative_to(ROOT).as_posix()}"


def target(link, path):
    """A link of the notebook at `path`, as its page needs it: notebooks become pages, other files
    of the project stand in its repository.
    """
    if re.match(r"[a-z]+:|#|$", link): return link
    file, _, anchor = link.partition("#")
    to = Path(os.path.normpath(path.parent / file))
    if to.suffix == ".ipynb" and to.is_relative_to(ROOT / "nbs") or to in modules():
        return os.path.relpath(
            page(to), page(path).parent) + ".ipynb" + (f"#{anchor.lower()}" if anchor else "")
    if to.is_relative_to(ROOT / "nbs" / "images"): return link
    return repository(to) + (f"#{anchor}" if anchor else "") if to.exists() else link


def relink(text, path):
    text = re.sub(r"(?<=\]\()([^()\s]+)(?=\))", lambda m: target(m[1], path), text)
    return re.sub(
        r'(?<=href=")([^"]+)(?=")', lambda m: target(m[1], path).replace(".ipynb", ".html"), text)


def outside(pattern, change, text):
    "`text` with `change` made to what matches `pattern`, but not within fenced code."
    done, at = [], 0
    for m in FENCED.finditer(text):
        done += [re.sub(pattern, change, text[at:m.start()], flags=re.M | re.S), m[0]]
        at = m.end()
    return "".join(done) + re.sub(pattern, change, text[at:], flags=re.M | re.S)


def asked(cell):
    """What the directives of a cell ask for; an exported cell asks by `source_hidden`, since
    directives would stand in its module.
    """
    hidden = cell.metadata.get("jupyter", {}).get("source_hidden")
    d = ({"hide-input": ""} if hidden else {}) | directives(cell.source)
    lines = {"lines": len(cell.source.splitlines())} if "fig-alt" in d else {}
    return lines | d


def folds(d):
    "True if a cell with these directives has its code folded; a picture of many lines has."
    return ({"echo", "hide-input"} & d.keys()
            or d.get("code-fold", str(d.get("lines", 0) > LINES).lower()) == "true")


def sources():
    "All that becomes a page: notebooks, and modules without one."
    return [*notebooks(), *modules()]


@cache
def names_of_pages(): return Counter(page(p).name for p in sources())


class Page:
    "The notebook, or the module without one, at `path` as a reader of the site should see it."
    def __init__(self, path):
        self.path, self.page = path, page(path)
        self.is_module = path.suffix == ".py"
        if self.is_module: self.nb, self.exports = site_api.of_module(path, self.page.as_posix())
        else:
            self.nb = nbformat.read(path, as_version=4)
            self.exports = site_api.exported(self.nb, self.page.as_posix())
        first = next(c.source for c in self.nb.cells if c.cell_type == "markdown")
        self.title = re.search(r"^# (.+)$", first, re.M)[1].strip()
        self.summary = " ".join(re.findall(r"^> ?(.*)$", first, re.M)).strip()
        self.equations = 0
        twice = names_of_pages()[self.page.name] > 1
        self.label = self.page.as_posix().replace("/", "-") if twice else self.page.name
        self.sections = {name for c in self.nb.cells if c.cell_type == "markdown"
                         for head in re.findall(r"^#+ .*", c.source, re.M)
                         for name in re.findall(r"`(\w+)`", head)}

    @property
    def minutes(self): return self.minutes_to(None)

    def minutes_to(self, mark):
        """About how long a reader needs for what is not folded, at the rates of PACE; to the cell
        that says `mark`.
        """
        n, folded = Counter(), 0            # folded: the level of the heading that folds the rest
        for cell in self.nb.cells:
            if mark and mark in cell.source: break
            d = asked(cell)
            if "hide" in d or "default_exp" in d: continue
            for block in re.split(
                r"^(?=#+ )", cell.source, flags=re.M) if cell.cell_type == "markdown" else []:
                if head := re.match(r"(#+) (.*)", block):
                    if len(head[1]) <= folded: folded = 0
                    if head[2].strip() in site_folds.SECTIONS: folded = len(head[1])
                if folded: continue
                n["formulas"] += block.count("$$") // 2
                text = re.sub(r"\]\([^)]*\)|\$\$.*?\$\$|\$[^$]*\$", "", block, flags=re.S)
                n["words"] += len(re.findall(r"[A-Za-z]{2,}", text))
            if cell.cell_type == "markdown" or folded: continue
            n["pictures"] += "fig-alt" in d
            if not (folds(d) or only_imports(cell.source)):
                n["lines of code"] += sum(bool(line.strip()) for line in cell.source.splitlines())
        return max(1, round(sum(n[what] / pace for what, pace in PACE.items())))

    @property
    def things(self): return [t for things in self.exports.values() for t in things]

    @property
    def exports_to(self):
        "The module that the notebook makes, or is; or None."
        if self.is_module: return ".".join(self.path.relative_to(ROOT).with_suffix("").parts)
        name = next((d["default_exp"] for c in self.nb.cells
                     if "default_exp" in (d := directives(c.source))), None)
        return name and f"{NBDEV.lib_name}.{name}"

    @property
    def floor(self):
        folder = self.page.parent.as_posix()
        if self.page.as_posix() == FLOORS["Exercises"]: return "Exercises"
        if folder in WORKSHOP: return "How it is made"
        if folder != ".":
            return next((floor for floor, f in FLOORS.items() if f == folder), folder.capitalize())
        return "How it is made" if self.exports_to else "Start"

    def references(self, text, names):
        "Inline code that names something exported, outside of headings and links, as a link to it."
        def refer(m):
            if not m["code"]: return m[0]
            code, thing = m["code"], names(m["code"], self.page.as_posix())
            # a section of this page has the name: a metric
            if thing is None or code in self.sections and thing.page != self.page.as_posix():
                return m[0]
            return (f"{{py:obj}}`{code} <{thing.full}>`" if "." in code
                    else f"{{py:obj}}`~{thing.full}`")
        spans = (r"^#+ [^\n]*|\[[^\[\]]*\]\([^()]*\)|``.+?``"
                 r"|(?<![`}])`(?P<code>[\w.]+(?:\(\))?)`(?!`)|`[^`]*`")
        return outside(spans, refer, text)

    def numbered(self, text):
        """Formulas that stand on lines of their own get a number, and an anchor: equation-kl-3. One
        with a label, `$$ ... $$ (eq-name)`, keeps its name.
        """
        def number(m):
            self.equations += 1
            return m[0] if m["label"] else f"{m['formula']} ({self.label}-{self.equations})"
        text = outside(
            r"^(?P<formula>[ \t>]*\$\$(?:(?!\$\$).)+\$\$)[ \t]*(?P<label>\([\w-]+\))?[ \t]*$",
            number, text)
        return re.sub(r"\[[^\[\]]*\]\(#(?:equation-)?(eq-[\w-]+)\)", r"{eq}`\1`", text)

    links = None                        # site_links.Links, as soon as all pages are known

    def linked(self, text): return self.links(text, self, outside) if self.links else text

    def prose(self, text, names):
        return self.numbered(self.references(self.linked(relink(text, self.path)), names))

    @property
    def number(self):
        "The number of the lesson, as it is referred to: 04; or nothing."
        return (re.match(r"\d\d(?=_)", self.path.stem) or [""])[0].replace("00", "")

    def sources(self):
        "Which lesson this is, where the page comes from, and where it runs."
        links = [f"lesson {self.number}"] if self.number else []
        if self.number or self.page.name == "start": links.append(f"{self.minutes} minutes")
        links += [f'<a href="{repository(self.path)}">{self.path.relative_to(ROOT).as_posix()}</a>']
        made = sorted({t.module for t in self.things}) if not self.is_module else []
        links += [f'<a href="{site_api.source_url(m, None)}">{m}</a>' for m in made]
        if not self.is_module:
            at = NBDEV.git_url.removeprefix("https://github.com/")
            path = self.path.relative_to(ROOT).as_posix()
            binder = f"https://mybinder.org/v2/gh/{at}/{NBDEV.branch}?labpath={path}"
            colab = f"https://colab.research.google.com/github/{at}/blob/{NBDEV.branch}/{path}"
            links.append(f'run it on <a href="{colab}">Colab</a> or <a href="{binder}">Binder</a>')
        title = urlencode({"title": f"Question on {self.page.as_posix()}: "})
        links.append(f'<a href="{NBDEV.git_url}/issues/new?{title}">ask about it</a>')
        return '\n\n<p class="sources">' + " · ".join(links) + "</p>\n"

    def cell(self, cell, d, names, intro):
        "`cell` as the site shows it."
        cell = cell.copy()
        if cell.cell_type == "markdown":
            if self.page.name in ("words", "notation"):
                cell.source = site_paths.lessons_linked(cell.source)
            cell.source = self.prose(cell.source, names)
            if m := re.fullmatch(r"exercise-(\w+)-task", cell.id):
                cell.source = f'<a id="exercise-{m[1]}"></a>\n\n{cell.source}'
            return cell
        cell.source = re.sub(r"\A(\s*#\s*\|.*\n?)+", "", cell.source)
        tags, options = [], {}
        if d.get("echo") == "false" or self.page.name == "index": tags.append("remove-input")
        elif "hide-input" not in d and folds(d):
            tags.append("hide-input")
            options |= {"code_prompt_show": d.get("code-summary", "Code"),
                        "code_prompt_hide": d.get("code-summary", "Code")}
        elif "hide-input" in d or intro and only_imports(cell.source):
            tags.append("hide-input")
            options |= {"code_prompt_show": "Imports" if only_imports(cell.source) else "Code"} | {
                "code_prompt_hide": "Imports" if only_imports(cell.source) else "Code"}
        if prints_sentences(cell): tags.append("sentences")
        if "fig-alt" in d: options["image"] = {"alt": d["fig-alt"]}
        cell.metadata = nbformat.from_dict({"tags": tags, "mystnb": options})
        for out in cell.outputs:
            data = out.get("data", {})
            if "text/markdown" in data:
                data["text/markdown"] = self.prose(data["text/markdown"], names)
            if "text/html" in data: data["text/html"] = relink(data["text/html"], self.path)
        return cell

    def prepared(self, names):
        "The notebook for Sphinx."
        cells, intro = [], True
        for cell in self.nb.cells:
            d = asked(cell)
            if "hide" in d or "default_exp" in d or site_paths.only(cell) == "readme": continue
            intro &= cell.cell_type == "markdown" or only_imports(cell.source)
            shown = self.cell(cell, d, names, intro)
            if cells and folded(shown) and folded(
                cells[-1]) == folded(shown) and not cells[-1].outputs:
                shown.source = f"{cells.pop().source}\n\n{shown.source}"
            if not cells and self.page.name != "index": shown.source += self.sources()
            cells.append(shown)
            if "widget" in d: cells.append(site_widgets.place(d["widget"], self.page))
            if things := self.exports.get(cell.id):
                text = site_api.as_directives(things, folded=not self.is_module)
                text = self.references_in_tables(text, names)
                cells.append(nbformat.v4.new_markdown_cell(text, id=f"{cell.id}-api"[-64:],
                                                           metadata={"class": "api"}))
        nb = self.nb.copy()
        nb.cells, nb.metadata = cells, nbformat.from_dict(dict(nb.metadata))
        return nb

    def references_in_tables(self, text, names):
        """Docstrings and comments refer to each other, too; the first two columns, names and types,
        do not.
        """
        lines = []
        for line in text.splitlines():
            if line.startswith("| "):
                first, second, *rest = re.split(r"(?<!\\)\|", line)[1:-1]
                lines.append(f"|{first}|{second}|"
                             + "".join(self.references(self.linked(r), names) + "|" for r in rest))
            else:
                lines.append(line if line.startswith(("`", ":", "<"))
                             else self.references(self.linked(line), names))
        return "\n".join(lines)


def prints_sentences(cell):
    """Does a cell print lines that are longer than a page is wide, and no columns? Those may be
    wrapped.
    """
    long = [line.strip() for out in cell.outputs for line in out.get("text", "").splitlines()
            if len(line) > WIDTH]
    return bool(long) and not any("  " in line for line in long)


def folded(shown):
    """The name of the fold that a cell's code is in, if any; folds that follow each other become
    one.
    """
    return shown.cell_type == "code" and shown.metadata["mystnb"].get("code_prompt_show")


def only_imports(source):
    "Imports before other code are folded away: a lesson opens with its question."
    first = r"import |from |viz\.style\(\)|torch\.set_num_threads\(|\s|#|\)|$"
    return all(re.match(first, line) for line in source.splitlines())


def by_floor(pages):
    """[(floor, its pages in the order in which they are read)], without the front page and the
    empty floors.
    """
    known = list(FLOORS) + sorted({p.floor for p in pages} - set(FLOORS))
    floors = [(floor, [p for p in pages if p.floor == floor and p.page.name != "index"])
              for floor in known]
    for _, found in floors:
        found.sort(key=lambda p: FIRST.index(p.page.name) if p.page.name in FIRST else len(FIRST))
    return [(floor, found) for floor, found in floors if found]


def timed(front, pages):
    "The paths of the front page, each with its minutes and a rail of its lessons with theirs."
    at = {site_paths.from_nbs(p): p for p in pages}
    def path(m):
        mark = LEAVES if m[0].startswith("1. ") else None
        minutes = {name: p.minutes_to(mark) for name, p in at.items() if f"({name})" in m[0]}
        total = sum(minutes[to] for *_, to in linked(m[0]))
        told, *rails = m[0].split("<br>")
        told = told.replace(":*", f'* <span class="minutes">{total} minutes</span>', 1)
        rails = "".join(rail(text, minutes) for text in rails)
        return f'{told} <span class="rails">{rails}</span>'

    def rail(text, minutes):
        found = linked(text)
        stops = [f'<span class="stop">{link} ({minutes[to]})</span>' for link, _, to in found]
        total = sum(minutes[to] for *_, to in found)
        name = re.match(r"\*(.+?):\*", text)
        head = f'*{name[1]}* <span class="minutes">{total} minutes</span> ' if name else ""
        return f'<span class="rail">{head}{" ".join(stops)}</span>'

    def linked(text): return re.findall(rf"({site_paths.LINK.pattern})", text)
    for cell in front.nb.cells:
        if cell.id != "paths": continue
        cell.source = re.sub(r"^\d\. .*$", path, cell.source, flags=re.M)
        *most, last = (f"{n} {what}" for what, n in PACE.items())
        cell.source += ("\n\nThe minutes are computed, not clocked: what stands open on a page, at "
                        f"{', '.join(most)} and {last} a minute.")


def walk(pages):
    "What pages know of each other: the order of the front, what is next, the room of exercises."
    front, walks = pages[0], site_paths.paths(pages[0])
    front.nb.cells = site_paths.front_first(front.nb.cells)
    known = site_paths.words(pages)
    early = {(p.page, term): p for _, steps in walks
             for p, term in site_paths.early(steps, pages)}
    for (_, term), p in early.items(): site_paths.explain(p, term, known[term][0], outside)
    for cell in next(p for p in pages if p.page.name == "words").nb.cells:
        cell.source = site_paths.WORD.sub(
            lambda m: f'| <a id="{site_paths.anchor(m[1].strip())}"></a>{m[0][2:]}', cell.source)
    for p in pages[1:]:
        if foot := site_paths.next_on(walks, p): p.nb.cells.append(foot)
        if p.page.as_posix() == FLOORS["Exercises"]:
            site_paths.list_first(p.nb, site_paths.room(pages))


def contents(pages):
    "The table of contents, floor by floor, as a cell for the end of the front page."
    def entry(p): return f"{p.title} <{p.page.as_posix()}>"
    more = {"Start": "\nA sheet of all formulas <sheet>"}
    blocks = [f"```{{toctree}}\n:hidden:\n:caption: {floor}\n\n" + "\n".join(map(entry, found))
              + more.get(floor, "") + "\n```" for floor, found in by_floor(pages)]
    return nbformat.v4.new_markdown_cell("\n\n".join(blocks), id="contents")


def llms(pages):
    "The site in one line per page."
    front = next(p for p in pages if p.page.name == "index")
    text = (f"# {front.title}\n\n> {front.summary}\n\nEverything in one file, code "
            f"and results included: [llms-full.txt](llms-full.txt).\n")
    for floor, found in by_floor(pages):
        text += f"\n## {floor}\n\n"
        for p in found:
            names = (f" `{p.things[0].module}`: {', '.join(t.name for t in p.things)}." if p.things
                     else "")
            text += f"- [{p.title}]({p.page.as_posix()}.html): {p.summary}{names}\n"
    return text


def as_markdown(page):
    "A page as Markdown: its prose, its code, and what the code printed."
    def linked(text):
        return re.sub(r"(?<=\]\()([^()\s:]+)\.ipynb", r"\1.html.md", relink(text, page.path))

    def cell(c):
        if c.cell_type == "markdown": return linked(c.source)
        source = re.sub(r"\A(\s*#\s*\|.*\n?)+", "", c.source)
        said = [linked(o.get("text") or o.get("data", {}).get("text/markdown")
                       or o.get("data", {}).get("text/plain", "")) for o in c.outputs]
        alt = directives(c.source).get("fig-alt")
        said = [
            f"[figure: {alt}]" if alt and re.match(r"<(Figure|IPython)", s) else s for s in said]
        return f"```python\n{source}\n```" + "".join(
            f"\n\n```text\n{s.rstrip()}\n```" for s in said if s.strip())
    cells = [cell(c) for c in page.nb.cells
             if not {"hide", "default_exp"} & directives(c.source).keys()]
    if page.is_module:  # four, since its docstring may hold code between three
        cells.append(f"````python\n{page.path.read_text(encoding='utf-8')}````")
    return "\n\n".join(cells) + "\n"


def for_programs(pages, out):
    """The site in one line per page; each page as Markdown, where its module's docstring points to;
    all of them in one file.
    """
    (out / "llms.txt").write_text(llms(pages), encoding="utf-8")
    whole = {f"{p.page.as_posix()}.html": as_markdown(p) for p in pages}
    for name, text in whole.items(): (out / f"{name}.md").write_text(text, encoding="utf-8")
    (out / "llms-full.txt").write_text(
        "\n---\n\n".join(f"<!-- {name} -->\n\n{text}" for name, text in whole.items()),
        encoding="utf-8")


def build(out):
    """The site in `out`; Sphinx works elsewhere, since it leaves the executed notebooks beside what
    it builds.
    """
    with tempfile.TemporaryDirectory() as work:
        html = Path(work) / "html"
        code = build_from(Path(work) / "source", html)
        if html.exists(): shutil.copytree(html, out, dirs_exist_ok=True)
    return code


def build_from(source, out):
    pages = [Page(path) for path in sources()]
    pages = [p for p in pages if p.page.name == "index"] + [
        p for _, found in by_floor(pages) for p in found]
    walk(pages)
    timed(pages[0], pages)
    Page.links = site_links.Links(pages)
    names = site_api.Names([t for p in pages for t in p.things])
    for p in pages:
        nb = p.prepared(names)
        if p.page.name == "index": nb.cells.append(contents(pages))
        to = source / f"{p.page}.ipynb"
        to.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(nb, to)
    nbformat.write(site_paths.sheet(pages), source / "sheet.ipynb")
    shutil.copytree(ROOT / "nbs" / "images", source / "images", dirs_exist_ok=True)
    site_widgets.copy(out / "_widgets")
    code = sphinx(["-W", "--keep-going", "-q", "-b", "html", "-c", str(ROOT / "docs"), "-d",
                   str(source / ".doctrees"), str(source), str(out)])
    if not code: for_programs(pages, out)
    return code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "_docs")
    out = parser.parse_args().out
    code = build(out)
    if not code: print(f"the site is in {out}: open {out / 'index.html'}")
    sys.exit(code)
