"""Calls that every kind shares: a dialect of tensors, a loss with its gradient, options moved."""

__all__ = ["DTYPES", "Losses", "DIALECTS", "noise", "report_dead", "same", "check_repeatable"]

import re

import torch

from .calls import Unreadable, result_tensors
from .names import usual_number

DTYPES = {"bool": torch.bool, "float": torch.float64, "int": torch.int64}
DIALECTS = dict(dtype=(torch.float64, torch.float32), adv=("BT", "flat"),
                mask=("bool", "float", "int"))
MAIN = ("loss", "total_loss", "policy_loss", "pg_loss", "actor_loss", "loss_policy", "value_loss",
        "vf_loss", "kl", "objective")


def noise(*shape, seed: int = 0, scale: float = 1.0):
    "Normal random numbers in float64, the same on each call."
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def same(a, b, tolerance: float = 1e-4) -> bool:  # two lists of tensors
    "True if all are equal up to rounding; NaN equals NaN."
    if len(a) != len(b) or any(x.shape != y.shape for x, y in zip(a, b)): return False
    scale = max([1e-12]
                + [y.detach().abs().nan_to_num(0, 0, 0).max().item() for y in b if y.numel()])
    return all(torch.allclose(x.double(), y.double(), tolerance, 1e-2 * tolerance * scale,
                              equal_nan=True) for x, y in zip(a, b))


def check_repeatable(name: str, outcome):  # of the function; () -> list of tensors
    "Unreadable if two calls with the same input differ."
    first = outcome()
    if not same(first, outcome()):
        raise Unreadable(f"{name} is random: two calls with the same input differ")
    if not all(bool(x.isfinite().all()) for x in first):
        raise Unreadable(f"{name} gives NaN or infinity on ordinary input")


class Losses:
    "A function that gives a loss with a gradient into one of its arguments, `leaf`."

    def __init__(self, subject, leaf):
        self.subject, self.leaf, self.reduced = subject, leaf, True

    def __call__(self, case: dict, **options):  # role -> tensor, (B, T) or (B,)
        "(loss, its gradient at the leaf): 0-dim and (B, T), float64, detached."
        case = dict(case)
        dtype = self.subject.dialect.get("dtype", torch.float64)
        x = case[self.leaf].detach().to(dtype).clone().requires_grad_()
        values = self._values(case, x, dtype)
        out = self.subject.run(values, **options)
        loss = self._loss(out, x)
        self.graded = loss.requires_grad
        if not self.graded:
            return loss.sum().detach().double(), torch.zeros_like(x).double()
        grad, = torch.autograd.grad(loss.sum(), x, allow_unused=True)
        grad = torch.zeros_like(x) if grad is None else grad
        return loss.sum().detach().double(), grad.double()

    def settle(self, case: dict):  # with a mask that has False
        "Turn a padding mask round if True means that a token counts, as in torchtune's losses."
        grad, m = self(case)[1].abs(), case["mask"]
        self.subject.dialect["counts"] = bool(grad[~m].any()) and not grad[m].any()

    def _values(self, case, x, dtype):
        "The arguments in the function's dialect; a leaf forbids x += 1, so it gets a copy."
        flat = self.subject.dialect.get("adv") == "flat"
        case[self.leaf] = x.clone()
        case |= {name: make(case) for name, make in DERIVED.items()
                 if name in self.subject.roles and name not in case
                 and (name == "padding" or name in self.subject.required())}
        if self.subject.dialect.get("counts"):
            case["padding"] = case["mask"]
        case = {name: v for name, v in case.items() if name in self.subject.roles}
        for name, v in case.items():
            if name in ("mask", "padding"):
                kind = DTYPES[self.subject.dialect.get("mask", "bool")]
                case[name] = v.to(dtype if kind == torch.float64 else kind)
            elif isinstance(v, torch.Tensor) and name != self.leaf:
                case[name] = v.to(dtype if v.is_floating_point() else v.dtype, copy=True)
            if flat and isinstance(v, torch.Tensor):
                case[name] = case[name].reshape(-1)
        return case

    def _loss(self, out, x):
        "The first number with a gradient, by its name or its place; a tensor of losses is summed."
        found = result_tensors(out)
        if not found:
            raise Unreadable(f"{self.subject.name} returned {_brief(out)}, expected a loss")
        named = [n for n in MAIN if n in found] + list(found)
        scalar = [found[n] for n in named if found[n].numel() == 1 and found[n].is_floating_point()]
        each = [found[n] for n in named if found[n].shape in (x.shape, x.shape[:1], (x.numel(),))
                and found[n].is_floating_point()]
        for of in (scalar, each):
            if of and (of is scalar or any(v.requires_grad for v in of) or not scalar):
                graded = [v for v in of if v.requires_grad]
                if of is scalar and not graded and any(v.requires_grad for v in each): continue
                self.reduced = of is scalar
                return (graded or of)[0]
        shapes = ", ".join(str(tuple(v.shape)) for v in found.values())
        raise Unreadable(f"{self.subject.name} returned a result of shape {shapes}, expected one "
                         f"loss or a loss for each token, {tuple(x.shape)}")


def _brief(out): return repr(out).replace("\n", " ")[:60]


DERIVED = {
    "ratio": lambda c: (c["logp"] - c["logp_old"]).exp(),
    "log_ratio": lambda c: c["logp"] - c.get("logp_old", c.get("logp_ref")),
    "padding": lambda c: ~c["mask"],
    "lengths": lambda c: c["mask"].sum(1),
    "index": lambda c: torch.arange(len(c["mask"])) // 4,
    "logp_rollout": lambda c: c["logp_old"],
    "labels": lambda c: torch.zeros_like(c["logp"], dtype=torch.long),
}


def moves(value) -> list:  # of a numeric option
    "Other values of an option."
    if isinstance(value, int): return [value + 1, 2 * value, max(value // 2, 1), value + 3, 0]
    return [value / 2, 1.5 * value, value + 0.37, 0.11, 3.3 * value + 0.01, 0.77]


STRINGS = """token-mean seq-mean-token-mean seq-mean-token-sum constant prompt-mean token_mean sum
    seq_mean mean none k1 k2 k3 kl mse abs low_var_kl ppo grpo dapo bnpo dr_grpo gspo cispo sapo
    token sequence std batch group rpo apo_zero robust sigmoid ipo hinge rloo""".split()


SILENT = re.compile(r"chunk|block|bucket|micro|thread|worker|verbose|seed|dim$|axis")  # no formula


def dead_options(subject, outcome) -> list:  # (**options) -> list of tensors; names
    "The numeric options that change nothing, whatever the switches say."
    def moved(name, **others):
        "True if an option has an effect, None if it cannot be moved."
        try:
            base = outcome(**others)
        except Unreadable: return None
        tried = []
        for value in moves(subject.numbers[name]):
            try:
                tried.append(not same(outcome(**others, **{name: value}), base, 1e-9))
            except Unreadable: continue
            if tried[-1]: return True
        return False if tried else None
    dead = [name for name in subject.numbers
            if not SILENT.search(name.lower()) and moved(name) is False]
    return [name for name in dead if not any(
        moved(name, **{switch: value}) for switch, value in _switched(subject))]


def report_dead(report, subject, outcome):  # (**options) -> list of tensors
    "Find the options that change nothing."
    for name in dead_options(subject, outcome):
        report.find("option-without-effect", f"{name} = {subject.numbers[name]}: other values "
                                             "give the same result")


def _switched(subject):
    for name, value in subject.switches().items():
        if isinstance(value, bool):
            yield name, not value
        if value is None and usual_number(name) is not None:
            yield name, usual_number(name)
        if value is None or isinstance(value, str):
            yield from ((name, other) for other in STRINGS if other != value)
