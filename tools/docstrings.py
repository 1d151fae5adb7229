"""The comments of arguments as numpy docstrings: `help()` and editors read no comments.

In the project an argument is explained once, in the comment beside it. setup.py runs
`with_parameters` over each
module that it puts into a wheel.
"""
import ast
import io
import tokenize

def comments(source):
    "Line number -> its comment."
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}


def arguments(function):
    "Each (argument, its default or None, the stars before its name)."
    a = function.args
    positional = a.posonlyargs + a.args
    missing = [None] * (len(positional) - len(a.defaults))
    yield from ((x, d, "") for x, d in zip(positional, missing + a.defaults))
    if a.vararg: yield a.vararg, None, "*"
    yield from ((x, d, "") for x, d in zip(a.kwonlyargs, a.kw_defaults))
    if a.kwarg: yield a.kwarg, None, "**"


def docstring(function, said):
    """The docstring, with sections for arguments and result; None if no comment says anything of
    them.
    """
    args = []
    for x, default, stars in arguments(function):
        comment = said.get((default or x).end_lineno)
        if comment and x.arg not in ("self", "cls"):
            kind = [ast.unparse(x.annotation)] if x.annotation else []
            if default: kind.append(f"default {ast.unparse(default)}")
            args += [
                f"{stars}{x.arg} : {', '.join(kind)}" if kind else stars + x.arg, f"    {comment}"]
    result = function.returns and said.get(function.returns.end_lineno)
    if not args and not result: return None
    lines = [ast.get_docstring(function) or ""]
    if args: lines += ["", "Parameters", "----------", *args]
    if result: lines += ["", "Returns", "-------", ast.unparse(function.returns), f"    {result}"]
    return "\n".join(lines).strip("\n")


def with_parameters(source):
    "A module whose docstrings say what the comments beside arguments and results say."
    said, lines = comments(source), source.splitlines()
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    for f in sorted(functions, key=lambda f: -f.lineno):
        first, text = f.body[0], docstring(f, said)
        if text is None or first.lineno == f.lineno: continue
        has = ast.get_docstring(f) is not None
        escaped = text.replace("\\", "\\\\").replace('"""', "'''")
        new = [" " * first.col_offset + line if line else ""
               for line in f'"""{escaped}\n"""'.splitlines()]
        lines[first.lineno - 1:first.end_lineno if has else first.lineno - 1] = new
    return "\n".join(lines) + "\n"
