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
    "Line number -> the comment behind its code."
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0]: t.string.lstrip("# ").strip() for t in tokens
            if t.type == tokenize.COMMENT and t.line[:t.start[1]].strip()}


def text(node): return node and ast.unparse(node)


def signature(function, said):
    """Parameters (name, type, default, comment) but for self and cls, and (type, comment) of what
    comes back. A comment is about the last that stands before it on its line.
    """
    a = function.args
    positional = a.posonlyargs + a.args
    defaults = [None] * (len(positional) - len(a.defaults)) + a.defaults
    given = [*zip(positional, defaults), (a.vararg, None), *zip(a.kwonlyargs, a.kw_defaults),
             (a.kwarg, None)]
    stars = {a.vararg: "*", a.kwarg: "**"}
    lines = {x: max(x.end_lineno, default.end_lineno if default else 0)
             for x, default in given if x and x.arg not in ("self", "cls")}
    start = max(lines.values(), default=function.lineno - 1) + 1
    end = function.returns.end_lineno if function.returns else next(
        (n for n in range(start, function.body[0].lineno) if n in said), None)  # `):  # so`
    owner = {line: x for x, line in lines.items()} | {end: "returns"}
    parameters = [(stars.get(x, "") + x.arg, text(x.annotation), text(default),
                   said.get(lines[x], "") if owner[lines[x]] is x else "")
                  for x, default in given if x in lines]
    return parameters, (text(function.returns) or "", said.get(end, ""))


def docstring(function, said):
    """The docstring, with sections for arguments and result; None if no comment says anything of
    them.
    """
    parameters, (kind, result) = signature(function, said)
    args = []
    for name, type_, default, comment in parameters:
        if not comment: continue
        about = ", ".join([type_] * bool(type_) + [f"default {default}"] * bool(default))
        args += [f"{name} : {about}" if about else name, f"    {comment}"]
    if not args and not result: return None
    lines = [ast.get_docstring(function) or ""]
    lines += ["", "Parameters", "----------", *args] if args else []
    if result:
        lines += ["", "Returns", "-------", *[kind] * bool(kind), f"    {result}"]
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
