"""Reads in four steps: probe the function in its dialect, measure, read off, report."""

__all__ = ["SHAPES", "noise", "ragged", "number", "edges", "read_eps", "Reader", "Losses"]

import math
import re

import torch

from .calls import Unreadable, result_tensors, same
from .names import GROUP_NAME, MASKS, usual_number
from .report import Report, number
from .weights import SHAPES, group_of, mode_weights, ragged, read_mode

REAL = (torch.float64, torch.float32)
FLAGS = ("bool", "float", "int")
MAIN = ("loss", "total_loss", "policy_loss", "pg_loss", "actor_loss", "loss_policy", "value_loss",
        "vf_loss", "kl", "objective")


def noise(*shape, seed: int = 0, scale: float = 1.0):
    "Normal random numbers in float64, the same on each call."
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def edges(weight, x):  # points -> numbers; the points, which rise
    "(place, True if it is 0 above) of each change between 0 and more."
    def gone(x): return weight(x).abs() < 1e-9
    zero = gone(x)
    for i in (zero[1:] != zero[:-1]).nonzero().flatten().tolist():
        low, high = x[i], x[i + 1]
        for _ in range(3):
            at = torch.linspace(low, high, len(x), dtype=torch.float64)
            change = gone(at)
            j = max(int((change != change[0]).double().argmax()), 1)
            low, high = at[j - 1], at[j]
        yield ((low + high) / 2).item(), bool(zero[i + 1])


def read_eps(divisor) -> float:  # a deviation -> what numbers of that deviation are divided by
    "The number added to the deviation or the variance, or the least divisor."
    for std in (10.0**-k for k in range(13)):
        whole = divisor(std)
        if whole > 1.025 * std:
            tiny, extra = divisor(std / 100), whole**2 - std**2
            if abs(tiny - whole) < 1e-3 * whole: return number(whole)
            inside = abs(tiny**2 - (std / 100) ** 2 - extra) < 1e-2 * extra
            return number(extra if inside else whole - std)
    return 0.0


class Reader:
    "A function that is read: `_probe` calls it once, `_read` measures, `_outcome` moves options."
    kind, axes, movable = "", ("", ""), True
    needs, supplied = "", ""  # roles that it cannot do without ("a|b": one of them); all it knows
    tries = dict(dtype=REAL, form=("BT", "flat"), flags=FLAGS)  # dialects

    def __init__(self, subject):
        self.subject, self.roles = subject, subject.roles
        self.report = Report(self.kind, subject.name, axes=self.axes)
        self.find, self.warn, self.facts = self.report.find, self.report.warn, self.report.facts
        self.shapes = [(self.rows(B), T) for B, T in SHAPES]
        self.batches = [ragged(B, T, seed=B) for B, T in self.shapes]
        self._start()
        for role in self.needs.split():
            if not self.roles.keys() & {*role.split("|")}:
                subject.refuse("names", role)
        subject.prepare(self.supplied.split())
        subject.tune(self.tries, self._probe)

    def rows(self, least: int) -> int:
        "A number of rows that a group's size divides, and 4."
        by = math.lcm(4, group_of(self.subject.numbers) or 1)
        return -(-least // by) * by

    def _start(self): "Settle roles and dialects before the first call."

    @property
    def masked(self) -> bool:
        "Whether a mask comes in."
        flat = self.subject.dialect.get("form") == "flat"  # each number is that of a response
        return bool(self.roles.keys() & (MASKS - {"lengths"} if flat else MASKS))

    @property
    def of_arrays(self): return self.subject.dialect.get("array") == "numpy"  # without gradient

    def found(self, *kinds) -> bool: return any(x.kind in kinds for x in self.report.findings)

    def explained(self, factor, measure) -> bool:  # (**options) -> what the factor multiplies
        "Whether an option is the factor, or its inverse, and the result follows it."
        for name, x in self.subject.numbers.items():
            near = x and min(abs(factor - x), abs(factor - 1 / x)) < 1e-3 * abs(factor)
            if not near or GROUP_NAME.search(name.lower()): continue
            base, half = measure(), {name: x / 2}
            got = self.in_dialect(lambda half=half: measure(**half))
            if got is not None and any(same([got], [k * base], 1e-3) for k in (0.5, 2)):
                return True
        return False

    def refuse(self, found, expected: str):
        "Unreadable: these results are not what is expected."
        shapes = ", ".join(str(tuple(x.shape)) for x in found) or "nothing"
        raise Unreadable(f"{self.subject.name} returned {shapes}; expected {expected}")

    def gradient(self, y, x):
        "Of the sum of y at x; 0 where none flows."
        if not y.requires_grad: return torch.zeros_like(x)
        try:
            return torch.autograd.grad(y.sum(), x, allow_unused=True, materialize_grads=True)[0]
        except RuntimeError as e:
            text = str(e).split(": [")[0].split(chr(10))[0]
            raise Unreadable(f"the gradient of {self.subject.name} fails: {text}") from e

    def in_dialect(self, call, **how):  # () -> tensors
        "Make a call in another dialect; None if it cannot be made."
        kept = self.subject.dialect
        self.subject.dialect = kept | how
        try: return call()
        except (Unreadable, RuntimeError, TypeError): return None
        finally:
            self.subject.dialect = kept

    def check_half(self, call, limit: float):  # () -> tensors; the largest error of the first
        "Warn if half precision that comes in is computed in half precision."
        one, two = (self.in_dialect(call, dtype=d) for d in (torch.float32, torch.bfloat16))
        if one is not None and two is not None:
            error = (two[0] - one[0]).abs().max()
            if error > limit:
                self.warn("precision", f"bfloat16 comes in: the result is off by {error:.2g}")

    def reading(self) -> Report:
        "Read; find the options that change nothing; say what was printed or changed."
        self._read()
        subject, values = self.subject, self.subject.numbers | self.subject.switches
        if not self.movable:
            self.report.notes.append("options were not moved: with this fault none can have an "
                                     "effect")
        for name in dead_options(subject, self._outcome) if self.movable else ():
            self.find("option-without-effect", f"{name} = {values[name]!r}: other values give the "
                                               "same result")
        if subject.changed:
            self.find("in-place", f"a call changes {' and '.join(sorted(subject.changed))} of its "
                                  "caller")
        if subject.printed:
            self.report.notes.append(f"it prints: {subject.printed.splitlines()[0][:80]}")
        return self.report


DERIVED = {
    "ratio": lambda c: (c["logp"] - c["logp_old"]).exp(),
    "log_ratio": lambda c: c["logp"] - c.get("logp_old", c.get("logp_ref")),
    "padding": lambda c: ~c["mask"],
    "lengths": lambda c: c["mask"].sum(1),
    "index": lambda c: torch.arange(len(c["mask"])) // 4,
    "logp_rollout": lambda c: c["logp_old"],
    "labels": lambda c: torch.zeros_like(c["logp"], dtype=torch.long),
}


class Losses(Reader):
    "A function that gives a loss with a gradient into one of its arguments, `leaf`."
    leaf, reduced = "logp", True

    def call(self, case: dict, **options):  # role -> tensor
        "Call with these tensors; ratios, lengths and the like follow from the others."
        case = case | {name: make(case) for name, make in DERIVED.items()
                 if name in self.roles and name not in case
                 and (name == "padding" or name in self.subject.required())}
        if self.subject.dialect.get("counts"):
            case["padding"] = case["mask"]
        if "lengths" in case and self.subject.dialect.get("form") == "flat":
            case["lengths"] = torch.ones(case["mask"].numel())  # each is a response
        return self.subject.run({role: self.turned(x) for role, x in case.items()}, **options)

    def turned(self, x):
        "Time first, where it runs there in what the function takes and gives."
        return x.T if self.subject.layout == "TN" and x.ndim == 2 else x

    def __call__(self, case: dict, leaf=None, **options):  # role -> tensor, (B, T) or (B,)
        "(loss, its gradient at the leaf): 0-dim and (B, T), float64, detached."
        leaf = leaf or self.leaf
        x = case[leaf].detach().double().clone().requires_grad_()
        loss = self._loss(self.call(case | {leaf: x}, **options), x).double()
        self.graded = loss.requires_grad or self.of_arrays
        return loss.sum().detach(), self.gradient(loss, x)

    def _loss(self, out, x):
        "The first number with a gradient, by its name or its place; a tensor of losses is summed."
        found = {n: self.turned(y) for n, y in result_tensors(out).items()
                 if y.is_floating_point()}
        if not found:
            raise Unreadable(f"{self.subject.name} returned {_brief(out)}, expected a loss")
        named = [found[n] for n in dict.fromkeys([*(n for n in MAIN if n in found), *found])]
        scalar = [y for y in named if y.numel() == 1]
        each = [y for y in named if y.shape in (x.shape, x.shape[:1], (x.numel(),))]
        graded = [y for y in scalar + each if y.requires_grad] or scalar or each
        if graded:
            self.numel = graded[0].numel()
            self.reduced = self.numel == 1
            return graded[0]
        self.refuse(named, f"one loss, or a loss for each token, {tuple(x.shape)}")

    def settle(self, case: dict):  # with a mask that has False
        "Turn a padding mask round if True means that a token counts, as in torchtune's losses."
        if "padding" not in self.roles or "counts" in self.subject.dialect: return
        grad, m = self(case)[1].abs(), case["mask"]
        self.subject.dialect["counts"] = bool(grad[~m].any()) and not grad[m].any()

    def check_mask(self, case, moved, level="token"):  # role -> by how much it moves under it
        "Find that the mask changes nothing, or that what is under it reaches the loss."
        if not self.masked: return
        name = next(self.roles[r] for r in MASKS if r in self.roles)
        m, (loss, grad) = case["mask"], self(case)
        whole = self(case | dict(mask=torch.ones_like(m)))
        if same([loss, grad], whole):
            if whole[1].any() and not whole[1][~m].any(): return  # it takes other tokens anyway
            return self.find("mask-ignored", f"{name} with False or all True: loss and gradient "
                                             "are the same")
        under = grad[~m].abs().max()
        if level == "token" and under > 1e-6 * grad.abs().max():
            return self.find("mask-leak", f"a token under {name} has the gradient {under:.3g}, "
                                          "the formula gives 0")
        other = {n: case[n] + by * ~m for n, by in moved.items()
                 if n in case and case[n].shape == m.shape}
        after = self(case | other)
        if not same([loss, grad * m], [after[0], after[1] * m]):
            self.find("mask-leak", f"other numbers under {name}: the loss goes from {loss:.4g} to "
                                   f"{after[0]:.4g}, the formula keeps it")

    def read_mode(self, weights, tolerance=2e-4) -> float:  # [(weights, mask)] of each shape
        "Read the aggregation off the weights of the tokens; gives their scale."
        facts, subject = self.facts, self.subject
        if not self.reduced:
            facts["aggregation"] = None
            w, m = weights[0]
            return w[m].mean().item()
        if self.found("mask-ignored") or not self.masked:
            weights = [(w, torch.ones_like(m)) for w, m in weights]
        found = read_mode(weights, group_of(subject.numbers), tuple(subject.numbers.values()),
                          tolerance)
        if found is None:
            self._by_number(weights)
        mode, scale, n = found or (None, weights[0][0].sum().item(), None)
        facts["aggregation"] = mode
        facts |= {} if n is None else {"group" if mode == "prompt-mean" else "length": n}
        for name, value in subject.switches.items():
            text = re.sub("[-_]", "", value.lower()) if isinstance(value, str) else ""
            wanted = MODES.get(text)
            if wanted and mode != wanted and re.search("agg|mode|reduc|norm", name.lower()):
                self.find("aggregation", f"{name}={value!r} promises {wanted}; the weights of the "
                                         f"tokens are those of {mode or 'no known mode'}")
        return scale

    def _by_number(self, weights):
        "Whether each response has its mean, and their number comes in as in no mode."
        each = [(w / mode_weights(m, "seq-mean-token-mean"))[m] for w, m in weights]
        one, two = (x.mean().item() for x in each)
        if not same(each, [x * 0 + x.mean() for x in each], 1e-3) or not one: return
        if abs(two / one - len(weights[1][1]) / len(weights[0][1])) < 1e-3:
            self.report.notes.append("the means of the responses are added, not divided by their "
                                     "number")
        elif abs(two / one - len(weights[0][1]) / len(weights[1][1])) < 1e-3:
            self.find("scale", f"the mean over {len(weights[0][1])} responses is multiplied by "
                               f"{one:.3g}, over {len(weights[1][1])} by {two:.3g}: it is divided "
                               "by their number twice")

    def check_scale(self, scale: float, what: str):
        "Find a factor that no option explains."
        self.facts["scale"] = number(scale)
        leaks = self.found("mask-leak", "mask-ignored")
        if abs(scale - 1) > 1e-3 and not leaks and not self.explained(
                scale, lambda **options: self(self.plain, **options)[1]):
            self.find("scale", f"the loss is {scale:.4g} times that of {what}")

    def check_empty(self, case, leaves):
        "NaN under the mask; a row and a batch in which nothing counts."
        if not self.masked: return
        mask, row = case["mask"], case["mask"].clone()
        row[1] = False
        def attempt(**change):
            try: return self(case | change)
            except Unreadable: return [torch.tensor(torch.nan)] * 2
        got = attempt(mask=row)
        nan = {n: case[n].masked_fill(~mask, torch.nan) for n in leaves
               if n in case and case[n].shape == mask.shape}
        for kind, found, says in (
                ("mask-nan", attempt(**nan), "NaN under the mask makes the loss or the gradient "
                                             "NaN"),
                ("empty-batch", attempt(mask=row & False), "a batch in which nothing counts gives "
                                                           "NaN, not 0"),
                ("empty-row", got, "a response without tokens gives NaN")):
            if not all(bool(x.isfinite().all()) for x in found):
                self.warn(kind, says)
        if self.facts.get("aggregation") in ("seq-mean-token-mean", "seq-mean-token-sum"):
            share = (got[1] * row).abs().sum() / (self(case)[1] * row).abs().sum()
            if (share - 1).abs() < 1e-6:
                self.warn("empty-row", "a response without tokens counts as 0 in the mean over "
                                       "responses; here it is left out")


MODES = {alias: mode for mode, aliases in {  # what an option says -> the mode
    "token-mean": "tokenmean token", "prompt-mean": "promptmean prompt", "sum": "sum",
    "seq-mean-token-mean": "seqmeantokenmean seqmean sequencemean sequence responsemean samplemean "
                           "sample",
    "seq-mean-token-sum": "seqmeantokensum", "constant": "constant",
    }.items() for alias in aliases.split()}


def _brief(out): return repr(out).replace("\n", " ")[:60]


STRINGS = """token-mean seq-mean-token-mean seq-mean-token-sum constant prompt-mean token_mean sum
    seq_mean mean none k1 k2 k3 kl mse abs low_var_kl ppo grpo dapo bnpo dr_grpo gspo cispo sapo
    token sequence std batch group rpo apo_zero robust sigmoid ipo hinge rloo""".split()
SILENT = re.compile(  # options of how, not of what
    r"chunk|block|bucket|micro|thread|worker|verbose|seed|dim|axis|inplace|in_place|return|debug|"
    r"log|print|compile|kernel|triton|fused|flash|liger|memory|checkpoint|offload|sync|device|"
    r"dtype|float|fp\d|bf16|upcast|cast|stable|safe|check|valid|strict|detach|grad|train|backend")


def _moves(value) -> list:  # of an option -> other values
    if isinstance(value, bool): return [not value]
    if isinstance(value, int): return [value + 1, 2 * value, max(value // 2, 1), value + 3, 0]
    return [value / 2, 1.5 * value, value + 0.37, 0.11, 3.3 * value + 0.01, 0.77]


def dead_options(subject, outcome) -> list:  # (**options) -> list of tensors; names
    "The options that change nothing, whatever the switches say."
    values = {n: x for n, x in (subject.numbers | subject.switches).items()
              if isinstance(x, (bool, int, float)) and not SILENT.search(n.lower())}
    def attempt(switched, **options):
        try:
            found = outcome(**options)
        except Unreadable: return None
        others = result_tensors(subject.out).values() if switched else ()  # a statistic counts too
        return [*found, *(x.detach() for x in others)]
    def moved(name, **others):
        "True if an option has an effect, None if it cannot be moved."
        switched, tried = isinstance(values[name], bool), None
        base = attempt(switched, **others)
        for value in _moves(values[name]):
            got = base and attempt(switched, **others, **{name: value})
            if got and not same(got, base, 1e-9): return True
            tried = False if got else tried
        return tried
    def others(name):
        for switch, value in subject.switches.items():
            number = usual_number(switch)
            more = ([not value] if isinstance(value, bool) else
                    [number] * (value is None and number is not None) + STRINGS)
            yield from ({switch: x} for x in more if x != value and switch != name)
    return [name for name in values if moved(name) is False
            and not any(moved(name, **other) for other in others(name))]
