"""The comments beside arguments, as numpy sections of docstrings: `help()` reads no comments.

An argument is explained once, in the comment beside it. What users call gets these sections when
its name is first asked for at the top of the package.
"""
import ast
import inspect
import io
import textwrap
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
    if a.vararg:
        yield a.vararg, None, "*"
    yield from ((x, d, "") for x, d in zip(a.kwonlyargs, a.kw_defaults))
    if a.kwarg:
        yield a.kwarg, None, "**"


def docstring(function, said):
    """The docstring, with sections for arguments and result; None if no comment says anything of
    them.
    """
    args = []
    for x, default, stars in arguments(function):
        comment = said.get((default or x).end_lineno)
        if comment and x.arg not in ("self", "cls"):
            kind = [ast.unparse(x.annotation)] if x.annotation else []
            kind += [f"default {ast.unparse(default)}"] if default else []
            args += [
                f"{stars}{x.arg} : {', '.join(kind)}" if kind else stars + x.arg, f"    {comment}"]
    result = function.returns and said.get(function.returns.end_lineno)
    if not args and not result: return None
    lines = [ast.get_docstring(function) or ""]
    lines += ["", "Parameters", "----------", *args] if args else []
    if result:
        lines += ["", "Returns", "-------", ast.unparse(function.returns), f"    {result}"]
    return "\n".join(lines).strip("\n")


def explain(thing):
    "Add what its comments say to the docstring of a function, or to those of a class's methods."
    if inspect.isclass(thing):
        ours = [c for c in thing.__mro__ if c.__module__.startswith("rlhf_notes.")]
        for name, f in [pair for c in ours for pair in vars(c).items()]:
            if inspect.isfunction(f) and (name == "__init__" or name[0] != "_"):
                explain(f)
    elif inspect.isfunction(thing):
        try:
            source = textwrap.dedent(inspect.getsource(thing))
        except OSError:  # a module without its source
            return
        said = docstring(ast.parse(source).body[0], comments(source))
        thing.__doc__ = said or thing.__doc__
