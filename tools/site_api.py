"""What the notebooks export, read from their source: names, parameters with their comments
(docments), and how a page of the site shows them.
"""
import ast
import importlib
import re
from dataclasses import dataclass, field
from functools import cache

import nbformat
from notebooks import NBDEV, ROOT, directives

from rlhf_notes._docstrings import comments, signature, text

TITLES = {"cli": "The command line", "training/runs": "The directory of a run"}
WORDS = {"float32", "generate", "log_softmax"}     # names of ours that mean something else in prose


@dataclass
class Thing:
    "A function, class or method that a notebook exports."
    name: str
    kind: str                           # function, class, method, property
    module: str                         # rlhf_notes.formulas.kl
    page: str                           # formulas/kl
    doc: str = ""
    # (name, type, default, comment) of each; None = not given
    params: list = field(default_factory=list)
    returns: tuple = ("", "")           # type, comment
    inside: list = field(default_factory=list)      # methods of a class

    @property
    def full(self): return f"{self.module}.{self.name}"


def _fields(node, said):
    """Fields of a dataclass: the comment behind each, the text below it, or the help text of its
    `option(default, help)`.
    """
    for f, below in zip(node.body, [*node.body[1:], None]):
        if not isinstance(f, ast.AnnAssign): continue
        default, comment = f.value, said.get(f.end_lineno, "")
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            comment = below.value.value
        if isinstance(default, ast.Call) and ast.unparse(default.func) == "option":
            default, comment = default.args[0], ast.literal_eval(default.args[1])
        yield ast.unparse(f.target), ast.unparse(f.annotation), text(default), comment


def _things(source, module, page):
    said = comments(source)
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            thing = Thing(node.name, "function" if isinstance(node, ast.FunctionDef) else "class",
                          module, page, ast.get_docstring(node) or "")
            if thing.kind == "function": thing.params, thing.returns = signature(node, said)
            elif any(re.search("dataclass|config_class", ast.unparse(d))
                     for d in node.decorator_list):
                thing.params = list(_fields(node, said))
            for f in node.body if thing.kind == "class" else []:
                if not isinstance(f, ast.FunctionDef): continue
                if f.name == "__init__": thing.params = signature(f, said)[0]
                elif f.name == "__call__" or not f.name.startswith("_"):
                    kind = "property" if any(
                        ast.unparse(d) == "property" for d in f.decorator_list) else "method"
                    thing.inside.append(Thing(f"{node.name}.{f.name}", kind, module, page,
                                              ast.get_docstring(f) or "", *signature(f, said)))
            yield thing
        elif isinstance(node, ast.Assign) and isinstance(
            node.value, ast.Call) and ast.unparse(node.value.func) == "namedtuple":
            name = text(node.targets[0])
            fields = getattr(importlib.import_module(module), name)
            defaults = {n: repr(d) for n, d in fields._field_defaults.items()}
            yield Thing(name, "class", module, page, "A namedtuple.",
                        [(n, None, defaults.get(n), "") for n in fields._fields])


def exported(nb, page):
    "{cell id: what that cell exports to the module of the notebook}, methods within their classes."
    name = next(
        (d["default_exp"] for c in nb.cells if "default_exp" in (d := directives(c.source))), None)
    if name is None: return {}
    cells = {c.id: list(_things(c.source, f"{NBDEV.lib_name}.{name}", page)) for c in nb.cells
             if c.cell_type == "code" and directives(c.source).get("export") == ""}
    return {i: things for i, things in cells.items() if things}


def of_module(path, page):
    "A module without a notebook as one: its docstring, and all that it defines in {cell id: ...}."
    source = path.read_text(encoding="utf-8")
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    first, _, rest = ast.get_docstring(ast.parse(source)).partition("\n")
    title = TITLES.get(page, page.replace("/", "."))
    text = f"# {title}\n\n> {first}\n{rest}".rstrip()
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text, id="docstring")])
    nb.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    return nb, {"docstring": list(_things(source, module, page))}


def module_file(module):
    path = ROOT / module.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).relative_to(ROOT)


@cache
def _lines(module):
    "{dotted name: (first, last line)} of what stands in the file of `module`."
    path = ROOT / module_file(module)
    if not path.exists(): return {}
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for name in [node.name] if hasattr(node, "name") else [
            ast.unparse(t) for t in getattr(node, "targets", [])]:
            found[name] = node.lineno, node.end_lineno
        for f in node.body if isinstance(node, ast.ClassDef) else []:
            if hasattr(f, "name"): found[f"{node.name}.{f.name}"] = f.lineno, f.end_lineno
    return found


def source_url(module, name):
    "Where the code of `module`.`name` stands in the repository, with its lines."
    lines = _lines(module).get(name)
    return f"{NBDEV.git_url}/blob/{NBDEV.branch}/{module_file(module).as_posix()}" + (
        f"#L{lines[0]}-L{lines[1]}" if lines else "")


def prose(text):
    "A comment as Markdown: what looks like markup by chance is none; backticks stay."
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([*_<>$\[\]{}\\|~^])", r"\\\1", p)
                   for p in parts).replace("\n", " ")


def _code(text):
    return "" if text is None else "`" + text.replace("|", r"\|").replace("\n", " ") + "`"


def _table(thing):
    rows = [(_code(n),
             " = ".join(filter(None, [_code(t), _code(d)])) if t else f"= {_code(d)}" if d else "",
             prose(c)) for n, t, d, c in thing.params if t or c]
    if any(thing.returns):
        rows.append(("*returns*", _code(thing.returns[0] or None), prose(thing.returns[1])))
    if not rows: return ""
    return "\n\n| parameter | type, default | meaning |\n|---|---|---|\n" + "\n".join(
        f"| {a} | {b} | {c} |" for a, b, c in rows) + "\n"


def as_directives(things, folded=True):
    "What one cell exports, as it stands on the page below it."
    return "\n\n".join(as_directive(thing, folded) for thing in things)


def as_directive(thing, folded, fence=5):
    """The Sphinx directive that puts `thing` on the page, into its table of contents, the search
    and the reach of references.
    Its table and its methods are folded where the cell above says the same."""
    shown = [n + (f"={d}" if d is not None else "") for n, _, d, _ in thing.params]
    if len(shown) > 12: shown = ["..."]
    brackets = "" if thing.kind == "property" else f"({', '.join(shown)})"
    inside = "\n\n".join(as_directive(t, folded, fence - 1) for t in thing.inside)
    if folded and len(thing.inside) > 3:
        inside = ('\n<details class="parameters"><summary>Methods</summary>\n\n'
                  f'{inside}\n\n</details>\n')
    table = _table(thing)
    if folded and table:
        table = ('\n\n<details class="parameters"><summary>Parameters</summary>'
                 f'{table}\n</details>\n')
    body = f"{prose(thing.doc)}{table}\n{inside}".strip()
    name = thing.name.split(".")[-1] if thing.kind in ("method", "property") else thing.name
    head = f"{'`' * fence}{{py:{thing.kind}}} {name}{brackets}".replace("\n", " ")
    options = f":module: {thing.module}\n" if thing.kind in ("function", "class") else ""
    return f"{head}\n{options}\n{body}\n{'`' * fence}"


class Names:
    "Which inline code names something of ours: `whiten` in prose becomes a link to it."
    def __init__(self, things):
        self.by_name, self.params = {}, {}  # parameters of ours: the pages they stand on
        for t in things:
            for x in [t, *t.inside]:
                for name in {x.name, f"{x.module.split('.')[-1]}.{x.name}", x.full}:
                    self.by_name.setdefault(name, []).append(x)
                for name, *_ in x.params: self.params.setdefault(name, set()).add(x.page)

    def __call__(self, text, page):
        "The thing that the inline code `text` on `page` names, if it can only be that."
        found = self.by_name.get(text.removesuffix("()"), [])
        here = [t for t in found if t.page == page]
        found = here or [t for t in found if t.page.startswith("formulas/")] or found
        if len(found) != 1 or text in WORDS: return None
        thing, formula = found[0], found[0].page.startswith("formulas/")
        if text.endswith("()"): return thing
        # a parameter, or the function?
        if text in self.params and not (formula and page not in self.params[text]): return None
        # `train` may be a word of any kind
        return thing if here or formula or not re.fullmatch(r"[a-z0-9]+", text) else None
