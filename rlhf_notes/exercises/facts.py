"""Facts about a wrong function: its relation to the right one, and the term that is to blame.

A list of mistakes ends somewhere. What can be said without a list, and is never false, is what has
been tried: that a function gives what the right one gives with other arguments (`substitutes`),
that its result has a relation to the right one (`relations`), that an argument has no effect on
it, that it would be right if an argument were 0. Each fact has been tried on all plain inputs and
on varied copies, and holds for all of them: that is what "here" means.
"""

__all__ = ['NO_RESULT', 'UNKNOWN', 'told', 'fact']

import contextlib
import io
import math
import re
from dataclasses import replace
from itertools import combinations, permutations

import torch

from .outcomes import alike, close, difference, each_close, kind_of
from .relations import combined, only_where, related, row_by_row
from .substitutes import substitutes, switches


def told(outcomes: list, least: int = 2) -> bool:
    "True if results have at least so many different numbers, all finite, that comparing says much."
    numbers = [v for o in outcomes for x in o.values for v in x.flatten().tolist()]
    finite = all(map(math.isfinite, numbers)) and not any(o.error for o in outcomes)
    return finite and len({*numbers}) >= least


NO_RESULT = "The result is not of the expected kind."
UNKNOWN = "No mistake that is known here."
SCALARS = ("Your code takes single numbers, and here it gets tensors of several: compute with "
           "whole rows, and choose with torch.where(condition, x, y) instead of `if`.")
_ONE = re.compile(r"Boolean value of Tensor with more than one|only one element tensors"
                  r"|to Python scalar|cannot be converted to Scalar")


def fact(exercise, f, got: list, expected: list) -> tuple:
    """(name, sentence): what yours shares with what is right, on the plain inputs first.

    There is no name if nothing but numbers can be shown.
    """
    both = [*zip(got, expected)]
    errors = [o.error for o in got if o.error]
    if errors and all(map(_ONE.search, errors)): return "scalars", SCALARS
    if errors or any(len(o.values) != len(x.values) for o, x in both): return None, NO_RESULT
    plain, n = both[:exercise.plain], len(expected[0].values)
    def pairs(part, k): return [(getattr(o, part)[k], getattr(x, part)[k]) for o, x in plain]
    def wrong(part, k): return not all(close(*pair) for pair in pairs(part, k))
    for order in permutations(range(n)):
        turned = [(replace(o, values=tuple(o.values[k] for k in order)), x) for o, x in plain]
        if order != (*range(n),) and all(alike(*pair) for pair in turned):
            return "order", "Right, but the results come in another order."
    for k in range(n):
        if wrong("values", k): return _of_value(exercise, f, plain, k)
    for k, argument in enumerate(exercise.wrt):
        if wrong("grads", k): return _of_gradient(exercise, pairs("grads", k), argument)
    return _of_edges(both)


def _of_value(exercise, f, plain, k):
    "(name, sentence) of result k."
    got = [replace(o, grads=()) for o, _ in plain]
    pairs = [(o.values[k], x.values[k]) for o, x in plain]
    odd = any(y.shape != x.shape or kind_of(y) != kind_of(x) for y, x in pairs)
    name, says = None, "The numbers are right."
    if not all(y.shape == x.shape and each_close(y, x).all() for y, x in pairs):
        name, says = _tried(exercise, f, got, pairs)
    if len(got[0].values) > 1 and says and name not in ("argument", "unused", "term"):
        says = f"Result {k + 1}: {says}"
    return name, f"{NO_RESULT} {says}".rstrip() if odd else says or UNKNOWN


def _tried(exercise, f, got, pairs):
    "(name, sentence), by the first of several means that finds something."
    cases = exercise.cases
    try:
        unused = _without_effect(exercise, f, got)
        have = f"{' and '.join(unused)} {'have' if unused[1:] else 'has'} no effect on yours."
        if unused[1:]: return "unused", have
        found = related(pairs) or _elsewhere(exercise, got, unused) or combined(pairs, cases)
        if unused: return (found[0], f"{have} {found[1]}") if found else ("unused", have)
        found = (found or only_where(pairs, cases) or _of_wrong(pairs) or row_by_row(pairs)
                 or _switched_off(exercise, f, pairs))
        if found: return found
    except TimeoutError: pass
    nan = any(y.isnan().any() for y, _ in pairs)
    return ("nan", "Yours is NaN where a number is expected.") if nan else (None, "")


def _of_gradient(exercise, pairs, argument):
    right = f"{'Any' if exercise.judged else 'The'} value is right"
    if not any(y.any() for y, _ in pairs):
        return "no_gradient", f"{right}, but no gradient flows into {argument}."
    if not any(x.any() for _, x in pairs):
        return "gradient", f"{right}, but a gradient flows into {argument}: detach it."
    name, says = (related(pairs) or combined(pairs, exercise.cases) or _of_wrong(pairs)
                  or row_by_row(pairs) or (None, UNKNOWN))
    return name, f"{right}, the gradient with respect to {argument} is not. {says}"


def _of_edges(both):
    if any(difference(*pair).startswith("yours") for pair in both): return None, NO_RESULT
    both = [pair for pair in both if not alike(*pair)]
    if all(close(*pair) for o, x in both for pair in zip(o.values, x.values)):
        return "gradient", "The value is right, but not the gradient on this input."
    nan = all(any(v.isnan().any() for v in o.values) for o, _ in both)
    if nan: return "nan", "Right on ordinary inputs, but NaN on this one."
    return None, "Right on ordinary inputs, but not on this one."


def _of_wrong(pairs):
    "A relation between the elements that are wrong."
    if any(y.shape != x.shape or y.dtype == torch.bool for y, x in pairs): return None
    wrong = [~each_close(y, x) for y, x in pairs]
    found = related([(y[w], x[w]) for (y, x), w in zip(pairs, wrong) if w.any()])
    return found and (found[0], f"Where yours is wrong, {found[1][0].lower()}{found[1][1:]}")


def _elsewhere(exercise, got, unused):
    "Other arguments for which yours is what is right."
    for way, change in substitutes(exercise.cases[0]).items():
        if any(re.search(rf"\b{name}\b", way[0]) for name in unused if name in way[1:]): continue
        other = exercise.outcomes(change(exercise.reference), plain=True)
        pairs = [(o, g) for o, g in zip(other, got) if told([g], 1)]      # without NaN
        if all(alike(*pair) for pair in pairs) and told([o for o, _ in pairs]):
            return "argument", f"Yours is what is right with {' in place of '.join(way)}."
    return None


def _yours(exercise, f):
    with contextlib.redirect_stdout(io.StringIO()):
        found = exercise.outcomes(f, plain=True)
    if any("TimeoutError" in o.error for o in found): raise TimeoutError
    return found


def _without_effect(exercise, f, got):
    "Arguments that yours does not depend on, whatever stands in their place."
    if not told(got): return []
    right, ways = exercise.outcomes(exercise.reference, plain=True), substitutes(exercise.cases[0])
    def no_effect(name):
        own = [change for (_, *replaced), change in ways.items() if name in replaced]
        others = (exercise.outcomes(change(exercise.reference), plain=True) for change in own)
        return all(all(map(alike, _yours(exercise, change(f)), got)) for change in own) and any(
            told(o) and not all(map(alike, o, right)) for o in others)
    return [name for name in exercise.arguments if no_effect(name)]


def _switched_off(exercise, f, pairs):
    "An argument, or two, with which yours would be right, if a third of the inputs shows it."
    if 3 * sum(not close(*pair) for pair in pairs) < len(pairs): return None
    ways = switches(exercise.cases[0])
    zeros = [way for way in ways if way[0] == "0"]
    for several in *((way,) for way in ways), *combinations(zeros, 2):
        def off(g):
            for way in several:
                g = ways[way](g)
            return g
        right = exercise.outcomes(off(exercise.reference), plain=True)
        if told(right, 3) and all(map(alike, _yours(exercise, off(f)), right)):
            were = [f"{old[0]} were" if old else "there were" for _, *old in several]
            text = " and ".join(f"{who} {new}" for who, (new, *_) in zip(were, several))
            return "term", f"Yours would be right if {text}: look at what that changes."
    return None
