"""The words: few enough; every symbol and every term once, in both languages, with a link that
leads somewhere and a name that the library has.
"""
import importlib
import inspect
import re
from collections import Counter
from dataclasses import fields, is_dataclass
from functools import cache

import nbformat
import notebooks
import site_pages
import site_paths
import site_search
from rules import broken

NBS = notebooks.ROOT / "nbs"
LINK = re.compile(r"\[[^\]]+\]\(([\w/.]+\.(?:ipynb|py))(#[\w-]+)?\)")
CHINESE = re.compile(r"[\u4e00-\u9fff]")


@cache
def tables(name="00_notation.ipynb"):
    "Every row of every Markdown table of a notebook, as a dict from its header."
    found = []
    for cell in nbformat.read(NBS / name, as_version=4).cells:
        if cell.cell_type != "markdown": continue
        head = None
        for line in cell.source.splitlines():
            if not line.startswith("|"):
                head = None
                continue
            row = [c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]]
            if head is None: head = row
            elif not set("".join(row)) <= set("-: "):
                assert len(row) == len(
                    head), f"{cell.id}: {len(row)} cells under {len(head)} headings: {line}"
                found.append(dict(zip(head, row)))
    return found


def symbols(): return [r for r in tables() if "symbol" in r]
def glossary(): return [r for r in tables("words.ipynb") if "English" in r]
def false_friends(): return [r for r in tables("words.ipynb") if "elsewhere" in r]


@cache
def module_of(notebook):
    "The module that a notebook exports, imported, or that is linked itself; None if there is none."
    if notebook.endswith(".py"):
        return importlib.import_module(notebook.removeprefix("../")[:-3].replace("/", "."))
    for cell in nbformat.read(NBS / notebook, as_version=4).cells:
        if name := notebooks.directives(cell.source).get("default_exp"):
            return importlib.import_module(f"rlhf_notes.{name}")


def linked(row): return [target for target, _ in LINK.findall(row["lesson"])]


def arguments(thing):
    "What a function, a class or a dataclass takes by name."
    if is_dataclass(thing): return {f.name for f in fields(thing)}
    return set(inspect.signature(thing).parameters)


def code_names(cell):
    "'`a`, `b` of `f`, `g`' -> [('f', ['a', 'b']), ('g', [])]"
    found, waiting = [], []
    for of, name in re.findall(r"( of )?`(\w+)`", cell):
        if of:
            found.append((name, waiting))
            waiting = []
        else: waiting.append(name)
    return found + [(name, []) for name in waiting]


def problems_of_symbol(row):
    """What is wrong with a row of the symbols: links that lead nowhere, names that no linked lesson
    exports.
    """
    found = [f"{row['symbol']}: {target} is not there" for target in linked(row)
             if not (NBS / target).exists()]
    if found: return found
    if not linked(row): return [f"{row['symbol']}: no link"]
    found += [f"{row['symbol']}: {what} is empty" for what in ("meaning", "shape", "unit")
              if not row[what]]
    modules = [m for m in map(module_of, linked(row)) if m is not None]
    names = code_names(row["in code"])
    if not names: return found + [f"{row['symbol']}: no name in code"]
    for thing, parts in names:
        owners = [getattr(m, thing) for m in modules if thing in m.__all__]
        if not owners: found.append(f"{row['symbol']}: no linked lesson exports {thing}")
        for part in parts:
            if owners and not any(part in arguments(o) for o in owners):
                found.append(f"{row['symbol']}: {thing} has no {part}")
    return found


def terms(row):
    return ([t.strip().lower() for t in row["English"].split(",")],
            [t.strip() for t in row["中文"].split("、")])


def problems_of_glossary(rows):
    """What is wrong with the glossary: a language that is missing, a term that is listed twice, a
    link that leads nowhere.
    """
    found = []
    for r in rows:
        if not r["English"] or CHINESE.search(r["English"]):
            found.append(f"{r['English']!r} is not English")
        if not CHINESE.search(r["中文"]) or not all(terms(r)[1]):
            found.append(f"{r['English']}: {r['中文']!r} is not Chinese")
        if not r["in one line"]: found.append(f"{r['English']}: no explanation")
        if "\\" in r["in one line"]: found.append(f"{r['English']}: TeX, which no hover can show")
        if not linked(r) or not all((NBS / target).exists() for target in linked(r)):
            found.append(f"{r['English']}: {r['lesson']} leads nowhere")
    for language in (0, 1):
        count = Counter(t for r in rows for t in terms(r)[language])
        found += [f"{term} is listed {n} times" for term, n in count.items() if n > 1]
    return found


def test_symbols_lead_to_their_lesson_and_their_code():
    assert not [problem for row in symbols() for problem in problems_of_symbol(row)]


def test_no_symbol_twice():
    count = Counter(r["symbol"] for r in symbols())
    assert max(count.values()) == 1 and len(count) >= 60, count.most_common(3)


def test_glossary_is_whole():
    assert len(glossary()) >= 60 and not problems_of_glossary(glossary())


def test_the_fields_own_names_are_there():
    "The names that the sources use, in their languages."
    english, chinese = ({t for r in glossary() for t in terms(r)[i]} for i in (0, 1))
    assert {"importance ratio", "clipped surrogate", "advantage", "whitening", "value head",
            "reward model", "reference policy", "rollout", "response", "truncation"} <= english
    assert {"重要性采样比", "裁剪后的代理目标", "优势", "白化", "价值头", "奖励模型", "参考策略",
            "回复", "截断", "双重裁剪", "熵奖赏", "折现因子", "均值平移", "奖励头", "拒绝采样",
            "学习率退火"} <= chinese


def test_false_friends_have_two_meanings():
    rows = false_friends()
    assert max(Counter(r["word"] for r in rows).values()) == 1
    words = ", ".join(r["word"] for r in rows)
    for word in ("truncation", "clip", "mask", "done", "KL penalty", "baseline", "group", "epoch",
                 "iteration", "return"):
        assert word in words
    for r in rows:
        assert len(r["here"]) > 10 and len(r["elsewhere"]) > 10 and linked(r) and all(
            (NBS / t).exists() for t in linked(r)), r["word"]


def test_planted_mistakes_are_found():
    "The checks above can fail."
    good = dict(symbol="$r$", meaning="ratio", shape="$(B, T)$", unit="none",
                lesson="[ratio](formulas/03_ratio.ipynb)")
    assert not problems_of_symbol(
        good | {"in code": "`logp` of `importance_ratio`, `effective_sample_size`"})
    for change, why in (({"in code": "`importance_ratios`"}, "exports importance_ratios"),
                        ({"in code": "`logps` of `importance_ratio`"}, "has no logps"),
                        ({"in code": "`whiten`"}, "exports whiten"),
                        ({"in code": ""}, "no name"),
                        ({"in code": "`importance_ratio`",
                          "lesson": "[ratio](formulas/3_ratio.ipynb)"}, "not there"),
                        ({"in code": "`importance_ratio`", "unit": ""}, "unit"),
                        ({"in code": "`importance_ratio`", "lesson": "ratio"}, "no link")):
        assert any(
            why in p
            for p in problems_of_symbol(good | {"in code": "`importance_ratio`"} | change)), change
    row = {"English": "advantage", "中文": "优势", "in one line": "better than expected",
           "lesson": "[advantage](formulas/08_advantage.ipynb)"}
    assert not problems_of_glossary([row])
    for other in (row, row | {"English": "edge"}, row | {"中文": "优势函数"}):
        assert any("listed 2 times" in p for p in problems_of_glossary([row, other]))
    assert problems_of_glossary([row | {"in one line": r"$\\pi$"}])
    for change in ({"English": ""},
                   {"中文": ""},
                   {"中文": "advantage"},
                   {"中文": "优势、"},
                   {"in one line": ""},
                   {"lesson": "[x](formulas/99_x.ipynb)"}):
        assert problems_of_glossary([row | change]), change


def shown(source):
    "The words of a Markdown cell, tables and folds too; no code, formulas or addresses."
    source = re.sub(r"\$\$.*?\$\$|\$[^$]*\$|```.*?```|`[^`]*`|<[^>]*>|\]\([^)]*\)", " ", source,
                    flags=re.S)
    return re.findall(r"[A-Za-z][A-Za-z'’-]+", source)


def words_of(page):
    "Words on the page: of its Markdown, and of the tables that its cells print."
    texts = [c.source if c.cell_type == "markdown" else o["data"]["text/markdown"]
             for c in page.nb.cells if "hide" not in site_pages.asked(c)
             for o in (c.get("outputs", []) if c.cell_type == "code" else [None])
             if o is None or "text/markdown" in o.get("data", {})]
    if page.page.name in ("words", "notation"): texts = map(site_paths.lessons_linked, texts)
    return sum(len(shown(text)) for text in texts)


LONGEST, NEWER, ALL = 1_800, 1_000, 64_000   # words of a page, of a later one, of all before those
LATER = {"identify", "credit", "papers", "course", "own_variant", "own_loop"}


def test_no_notebook_is_long():
    words = {p.page.name: words_of(p) for p in map(site_pages.Page, notebooks.notebooks())}
    assert max(words.values()) <= LONGEST, {n: k for n, k in words.items() if k > LONGEST}
    assert max(words[name] for name in LATER) <= NEWER, {n: words[n] for n in LATER}
    assert sum(k for name, k in words.items() if name not in LATER) <= ALL
    assert shown("Two words, `no code`, $x$ [link](to/it.ipynb)\n| a table |") == [
        "Two", "words", "link", "table"]


def test_every_lesson_closes_with_one_paragraph():
    def other(path):
        sources = [c.source for c in nbformat.read(path, as_version=4).cells
                   if c.cell_type == "markdown"]
        return sum(s.count("## In one paragraph\n") for s in sources) != 1
    lessons = [p for p in notebooks.notebooks() if p.name[0].isdigit() and p.name[:2] != "00"]
    assert not broken(other, lessons)


def test_each_word_is_met_before_it_is_used_on_each_path():
    "Set off, on the page of its lesson, or a link to its line in `words`: else the path fails."
    pages = list(map(site_pages.Page, site_pages.sources()))
    pages.sort(key=lambda p: p.page.name != "index")
    walks = [steps for _, steps in site_paths.paths(pages[0])]
    def early():
        return sorted({(p.page.name, term) for steps in walks
                       for p, term in site_paths.early(steps, pages)})
    assert sum(map(len, walks)) > 25 and {
        ("start", "logits"), ("rlhf", "nat"), ("ratio", "TRL"), ("ratio", "DAPO"),
        ("rlhf", "REINFORCE++")} <= set(early())  # what the site explains
    site_pages.walk(pages)
    assert early() == []
    next(p for p in pages if p.page.name == "start").nb.cells.insert(
        1, nbformat.v4.new_markdown_cell("The explained variance is large.", id="planted"))
    assert early() == [("start", "explained variance")]


def test_a_word_may_have_a_module_as_its_lesson():
    pages = [site_pages.Page(NBS / "words.ipynb")]
    assert site_paths.words(pages)["tokenizer"][1] == "../rlhf_notes/hub/load.py"
    assert site_paths.words(pages)["policy"][1] == "control/17_policy.ipynb"
    found = site_search.defines()
    assert found["reward function"] == "hub/prompts" and found["gae"] == "formulas/advantage"


def test_what_people_ask_for_leads_to_a_heading_that_is_there():
    at = {site_pages.page(p).as_posix(): p for p in site_pages.sources()}
    def lost(to):
        page, _, start = to.partition("#")
        cells = site_pages.Page(at[page]).nb.cells if start else []
        text = "\n".join(c.source for c in cells if c.cell_type == "markdown")
        heads = [re.sub(r"[^a-z0-9]+", "-", head.lower())
                 for head in re.findall(r"^#+ `*(.*)$", text, re.M)]
        return start and not any(head.startswith(start) for head in heads)
    known = {*site_search.ABOUT.values()} - {"sheet"}
    assert not [to for to in known if lost(to)] and lost("why#nobody")


def test_a_path_leads_through_modules():
    at = NBS / "index.ipynb", notebooks.ROOT / "rlhf_notes" / "hub" / "load.py"
    front, page = map(site_pages.Page, at)
    walks = site_paths.paths(front)
    foot = site_paths.next_on(walks, page).source
    assert "[your own task](prompts.py)" in foot
    site_pages.timed(front, [page, *map(site_pages.Page, notebooks.notebooks()),
                             site_pages.Page(page.path.with_name("prompts.py"))])
    cards = next(c.source for c in front.nb.cells if c.id == "paths")
    stops = re.findall(r'class="stop">\[.+?\]\(.+?\) \(\d+\)</span>', cards)
    assert len(stops) == sum(len(steps) for _, steps in walks) > 25


def test_a_word_is_introduced_by_what_sets_it_off():
    for term, text in (
            ("nat", "a **nat**"), ("batch", "two *batches*"), ("entropy", "[entropies]")):
        assert site_paths.introduced(term, text)
    for text in ("**reference**, each nat of [KL]", "| nat | KL |", "*natural*", "a nat"):
        assert not site_paths.introduced("nat", text)


def test_a_word_is_explained_once_and_not_within_code_or_links():
    page = next(p for p in map(site_pages.Page, notebooks.notebooks()) if p.page.name == "ratio")
    text = ("`critic` [a critic](x) $critic$\n\n# critic\n\n    V: critic\n\n"
            "The critic, a critic.")
    page.nb.cells = [nbformat.v4.new_markdown_cell(text, id="planted")]
    assert site_paths.explain(page, "critic", "the `value` function", site_pages.outside)
    link = '<a class="word" title="the value function" href="../words.html#word-critic">critic</a>'
    assert page.nb.cells[0].source == text.replace("The critic", f"The {link}")
