"""Checks that name the mistake: the usual wrong functions are known, and outcomes compared.

A check runs the right function, the usual wrong ones and the reader's on the same inputs, compares
values and gradients, and names the wrong function whose outcomes are the reader's. On the plain
inputs, and on varied copies of them, a wrong formula shows; on the edges (a NaN under the mask, an
empty mask, numbers that overflow) a right formula may still fail. Of an unlisted wrong function,
`facts` tells what is true of it. Each lesson registers its exercises with `exercise`.
"""

__all__ = ['LEAK', 'READ_LEAK', 'CHANGED', 'EXERCISES', 'Verdict', 'Exercise', 'exercise']

import re
import sys
from dataclasses import dataclass, replace

import torch

from .facts import fact, told
from .outcomes import alike, attempt, difference, show, show_shape
from .substitutes import varied


@dataclass
class Verdict:
    "The result of a check; true if the function is right."
    right: bool                # Whether it agrees with the reference on all inputs
    text: str                  # The finding, to the reader
    mistake: str | None = None # Name of the mistake, if it is known
    figure: object = None      # Expected against yours, where there is a picture

    def __bool__(self): return self.right
    def __repr__(self): return self.text
    def _ipython_display_(self): pass  # it has been printed


LEAK = ("A value that does not count leaks: NaN times 0 is NaN, in a gradient too. Put 0 "
        "in its place with torch.where before you compute.")
READ_LEAK = "01_masking, Mask before, not after"
CHANGED = "The result is right, but your function changes {} in place. Work on a copy."


@dataclass(repr=False)
class Exercise:
    "A function for the reader to write, and the usual ways to get it wrong."
    name: str             # `check.NAME`
    lesson: str           # Notebook that asks for it
    reference: object     # The right function
    task: str             # Signature and result in one line
    tip: str              # A hint without the solution
    inputs: list          # Tuples of arguments on which a wrong formula shows
    mistakes: dict        # Name -> (wrong function, explanation[, where to read])
    edges: list = ()      # Inputs on which a right formula may still fail
    wrt: tuple = ()       # Arguments with respect to which the gradient is compared too
    picture: object = None # picture(exercise, f) -> figure or None
    judged: object = None # judged(value, *arguments) -> the part of a result that is compared
    read: str = ""        # The lesson and its section that explain it: "06_kl, The formulas"

    def __post_init__(self):
        signature = re.sub(r"\([^()]*\)", "", self.task.split(" -> ")[0][2:-1])
        self.arguments = [argument.split()[0] for argument in signature.split(",")]
        def named(inputs): return [dict(zip(self.arguments, x, strict=True)) for x in inputs]
        plain = named(self.inputs)
        plain += [varied(case, i) for i, case in enumerate(plain)]
        self.plain, self.cases = len(plain), plain + named(self.edges)
        self._known = None

    def outcomes(self, f, plain: bool = False) -> list:  # one `Outcome` for each input, edges last
        "Call `f` on all inputs, or without gradients on the plain ones."
        found, cases = [], self.cases[:self.plain] if plain else self.cases
        for case in cases:
            hangs = found and "TimeoutError" in found[-1].error
            found.append(found[-1] if hangs else attempt(f, case, () if plain else self.wrt))
        if not self.judged: return found
        def judge(o, case): return tuple(self.judged(v, *case.values()) for v in o.values)
        return [replace(o, values=judge(o, case)) for o, case in zip(found, cases)]

    def known(self) -> tuple:  # (outcomes of the reference, {name: outcomes})
        "Outcomes of the reference and of the mistakes."
        if self._known is None:
            wrong = {name: self.outcomes(f) for name, (f, *_) in self.mistakes.items()}
            self._known = self.outcomes(self.reference), wrong
        return self._known

    def _match(self, got, expected, known):
        "The name of the mistake with these outcomes, or None."
        plain, every = range(self.plain), range(len(got))
        wrong = [i for i in every if difference(got[i], expected[i], self.wrt)]
        def same(name, where): return all(alike(got[i], known[name][i]) for i in where)
        def shows(name, where): return not all(alike(known[name][i], expected[i]) for i in where)
        if not wrong: return None
        right = [i for i in every if i not in wrong]                # NaN speaks against no name
        names = [name for name, outcomes in known.items() if not any(
            told(outcomes[i:i + 1], 1) and shows(name, [i]) for i in right)]
        tries = [plain]
        if wrong[0] not in plain:
            names = [name for name in known if not shows(name, plain)]
            tries = [every, *([i] for i in wrong)]
        found = (n for where in tries for n in names if shows(n, where) and same(n, where))
        return next(found, None)

    def _mistake(self, f, got, wrong):
        "(name, sentence) of a listed mistake, with gradients or by values alone, or of a fact."
        expected, known = self.known()
        name = self._match(got, expected, known)
        if not name:
            by_value = {n: _values(outcomes) for n, outcomes in known.items()}
            name = self._match(_values(got), _values(expected), by_value)
            name = None if name and "gradient" in self.mistakes[name][1] else name
        if name: return name, self.mistakes[name][1]
        if any(_leaks(got[i], self.cases[i]) for i in wrong): return "leak", LEAK
        return fact(self, f, got, expected)

    def _explain(self, got, wrong, name, says):
        expected, known = self.known()
        def shows(i):
            if name == "leak": return _leaks(got[i], self.cases[i])
            return name in known and alike(got[i], known[name][i])
        named = [*filter(shows, wrong)]
        i = min(named or wrong, key=lambda i: (i >= len(self.inputs), len(str(self.cases[i]))))
        what = difference(got[i], expected[i], self.wrt)
        tell = show_shape if name == "scalars" else show
        case = "\n          ".join(f"{k} = {tell(v)}" for k, v in self.cases[i].items())
        read = self.explained(name)
        return (f"{self.name}: not yet. {says}\n  input:  {case}\n  result: {what}\n"
                f"  check.{self.name}.hint() gives a hint{read and f'; read {read}'}.")

    def explained(self, mistake: str | None = None) -> str:  # "06_kl, The formulas"
        "Lesson and section that explain a mistake, or the exercise."
        own = READ_LEAK if mistake == "leak" else "".join(self.mistakes.get(mistake, ())[2:])
        return own or self.read

    def __call__(self, f, strict: bool = False, draw: bool = True) -> Verdict:
        "Judge `f`, print the verdict and return it; `strict` raises an AssertionError if wrong."
        if not callable(f): raise TypeError(f"f must be a function, got {type(f).__name__}")
        got, expected = self.outcomes(f), self.known()[0]
        wrong = [i for i, o in enumerate(got) if difference(o, expected[i], self.wrt)]
        wrong = [i for i in wrong if i < self.plain] or wrong
        wrong = [i for i in wrong if got[i].error] or wrong
        changed = sorted({name for o in got for name in o.changed})
        if wrong:
            name, says = self._mistake(f, got, wrong)
            verdict = Verdict(False, self._explain(got, wrong, name, says), name)
        elif changed:
            text = f"{self.name}: not yet. {CHANGED.format(' and '.join(changed))}"
            verdict = Verdict(False, text, "changed")
        else:
            verdict = Verdict(True, f"{self.name}: right, on all {len(got)} inputs.")
        if strict and not verdict: raise AssertionError(verdict.text)
        print(verdict.text)
        if wrong and draw and self.picture:
            verdict.figure = _shown(self.picture(self, f))
        return verdict

    def hint(self):
        "Print a hint without the solution."
        print(f"{self.name}: {self.tip}")

    def __repr__(self): return f"check.{self.name}(your_function): {self.task}"


def _shown(figure):
    "The figure, displayed if this is a notebook, and closed: matplotlib keeps those that are open."
    if figure is None: return None
    import matplotlib.pyplot as plt
    plt.close(figure)
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython():
        sys.modules["IPython"].display.display(figure)
    return figure


def _values(outcomes): return [replace(o, grads=()) for o in outcomes]


def _leaks(outcome, case):
    return _has_nan(case.values()) and _has_nan(outcome.values + outcome.grads)


def _has_nan(parts):
    tensors = [v for x in parts for v in (x if isinstance(x, list) else [x])]
    return any(isinstance(v, torch.Tensor) and bool(v.isnan().any()) for v in tensors)


EXERCISES = {}


def exercise(name: str, *given, **named):
    """Register an `Exercise`, its fields in order or by name.

    Any other name is a mistake: (wrong function, explanation).
    """
    fields = {field: named.pop(field) for field in Exercise.__dataclass_fields__.keys() & named}
    EXERCISES[name] = Exercise(name, *given, mistakes=named, **fields)
