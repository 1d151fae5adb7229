"The limits of the style: widths, statements, lengths, docstrings, words."
import ast
import json
import re

import notebooks
from rules import broken, text

PACKAGE = notebooks.ROOT / "rlhf_notes"
WIDTH, LENGTH = 100, 40
NO_OPENING = re.compile(r"(What|How|Who|Whose|Are|Is)\b")
# Words that the field does not use for these things, and the files in which they mean something
# else.
OLD_WORDS = re.compile(r"\b(words?|answers?|query|queries|seam|Keeper|Laps|human_score)\b")
OTHER_MEANING = {"names.py": {"word", "words"}, "check.py": {"answer"},
                 "failures.py": {"answer"}, "task.py": {"word", "words"}}

FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if p.name != "_modidx.py"]
BESIDE = [p for room in ("tests", "tools", "benchmarks")
          for p in sorted((notebooks.ROOT / room).rglob("*.py"))]


def wide(source):
    return [line for line in source.splitlines()
            if len(line) > WIDTH and not line.startswith(("# %%", "| "))]


def crowded(source):
    """Lines with more than one statement.

    A guard with its way out (`if x: return y`) and a function of one expression may share a line.
    """
    lines, found = source.splitlines(), []
    ways_out = (ast.Return, ast.Raise, ast.Continue, ast.Break, ast.Pass)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt) or not (
            before := lines[node.lineno - 1][:node.col_offset].strip()):
            continue
        header = re.match(r"(if|elif|else|try|def|except)\b", before) and before.endswith(":")
        one = isinstance(node, (*ways_out, ast.Expr) if before.startswith("def") else ways_out)
        if before not in ("async", "el") and not (header and one):
            found.append(lines[node.lineno - 1])
    return found


def long_functions(source):
    functions = [n for n in ast.walk(ast.parse(source))
                 if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    # a signature with an argument a line is no code
    return [(f.name, n) for f in functions if (n := f.end_lineno - f.body[0].lineno + 1) > LENGTH]


def odd_docstrings(source):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = [
        ast.get_docstring(n) or "" for n in ast.walk(ast.parse(source)) if isinstance(n, kinds)]
    return [text for text in texts if NO_OPENING.match(text)]


ARGUMENT = re.compile(r" {4}[*\w][^#]*,(  # .+)?")
FIRST, LAST = re.compile(r"(async )?def \w+\("), re.compile(r"\).*:(  # .+)?")
# A comment begins in lower case, unless with a name: a constant, or one with a capital inside.
CAPITAL = re.compile(r"#\s*(?!True|False|None|Matplotlib|Adam)[A-Z][a-z]+\b")


def dialects(source):
    """Lines of signatures with comments that are not in the one form.

    One argument a line, indented by four, two spaces before `#`; or the whole on one line.
    """
    lines, found = source.splitlines(), []
    for f in ast.walk(ast.parse(source)):
        if not isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)): continue
        header = [line[f.col_offset:] for line in lines[f.lineno - 1:f.body[0].lineno - 1]]
        noted = [line for line in header if "#" in line]
        form = [FIRST, *[ARGUMENT] * (len(header) - 2), LAST]
        if noted and len(header) > 1:
            found += [line for line, shape in zip(header, form) if not shape.fullmatch(line)]
        found += [line for line in noted if "  # " not in line or CAPITAL.search(line)]
    return found


def old_words(source, allowed=()):
    return [m[0] for m in OLD_WORDS.finditer(source) if m[0] not in allowed]


def test_a_line_ends_at_100_columns():
    assert len(BESIDE) > 100
    assert not broken(lambda p: wide(text(p)), FILES + BESIDE)


def test_a_line_holds_one_statement(): assert not broken(lambda p: crowded(text(p)), FILES)


def test_a_function_fits_a_screen(): assert not broken(lambda p: long_functions(text(p)), FILES)


def test_a_docstring_says_what_it_returns_or_does():
    assert not broken(lambda p: odd_docstrings(text(p)), FILES)


def test_a_signature_has_the_one_form(): assert not broken(lambda p: dialects(text(p)), FILES)


def test_the_words_are_those_of_the_field():
    assert not broken(lambda p: old_words(text(p), OTHER_MEANING.get(p.name, ())), FILES)


def public_names(cell):
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [n.name for n in ast.parse(cell).body if isinstance(n, kinds) and n.name[0] != "_"]


LESSONS = [p for p in notebooks.notebooks() if p.parent.name != "exercises"]


def test_an_exported_cell_holds_one_public_name():
    def crowds(path):
        cells = [c for c in json.loads(text(path))["cells"] if c["cell_type"] == "code"]
        return [names for c in cells if re.match(r"#\| export\n", s := "".join(c["source"]))
                and len(names := public_names(s)) > 1]
    assert not broken(crowds, LESSONS)


def test_what_breaks_a_limit_is_seen():
    "The tests above can fail."
    assert wide("x = " + "1" * 97) and not wide("x = " + "1" * 96)
    for bad in ("for x in y: f(x)\n", "a = 1; b = 2\n", "with f: g()\n", "if a: b = 1\n",
                "if a:\n    b()\nelse: c()\n", "while a: b()\n", "try: a()\nexcept E: pass\n"):
        assert crowded(bad), bad
    for good in ("def f(x):\n    if x: return 1\n    if not x: raise E\n", "def f(x): return x\n",
                 "if a:\n    b()\nelif c:\n    d()\n", "x = [a for a in b]\n",
                 "try:\n    a()\nexcept E: pass\n"):
        assert not crowded(good), good
    assert long_functions("def f():\n" + "    x()\n" * 41)
    assert not long_functions("def f():\n" + "    x()\n" * 40)
    assert odd_docstrings('def f():\n    "What it is."\n')
    assert odd_docstrings('class A:\n    "Is it?"\n')
    assert not odd_docstrings('def f():\n    "Whatever it is."\n')
    assert old_words("the answer to a query") == ["answer", "query"]
    assert not old_words("crosswords")
    assert public_names("def a(): pass\nclass B: pass\ndef _c(): pass\n") == ["a", "B"]
    assert dialects("def f(x, # what\n      ): pass\n")
    assert dialects("def f(\n    x,  # What\n): pass\n")
    assert not dialects("def f(\n    x,  # True = so\n) -> int:  # what\n    pass\n")
