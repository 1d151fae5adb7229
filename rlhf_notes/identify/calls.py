"""A function of someone else, called with tensors by what its parameters mean."""

__all__ = ["LIMIT", "TimeIsOver", "time_limit", "quiet", "result_tensors", "same", "Subject",
           "Unreadable"]

import contextlib
import inspect
import io
import itertools
import math
import signal
import threading
import time
import warnings

import torch

from ..formulas.logprob import selective_log_softmax
from .names import MASKS, kind_of_roles, parts_of, role_of, usual_number
from .packs import EMPTY, opened
from .weights import group_of


class Unreadable(ValueError):
    "The function cannot be called, or gives nothing that can be read: one sentence."


LIMIT = 10.0  # seconds


class TimeIsOver(BaseException):
    "No `except Exception` keeps it."


@contextlib.contextmanager
def time_limit(seconds: float):  # of the processor, or six times as many by the clock
    """Raise TimeoutError when they are over, where signals can: in the main thread, not on Windows.
    What other programs take does not count; a function that sleeps is ended by the clock."""
    is_main = threading.current_thread() is threading.main_thread()
    if not hasattr(signal, "setitimer") or not is_main:
        yield
        return
    busy, clock = time.thread_time() + seconds, time.monotonic() + 6 * seconds
    def stop(*_):
        if time.thread_time() > busy or time.monotonic() > clock: raise TimeIsOver
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, min(1, seconds / 4))
    try:
        yield
    except TimeIsOver:
        raise TimeoutError(f"no result after {seconds:g} s; is there an endless loop?") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def quiet(seed: int):  # of PyTorch's global generator, which is as before afterwards
    "Keep what a call prints, warns of and draws to itself; gives what was printed."
    said = io.StringIO()
    with (contextlib.redirect_stdout(said), contextlib.redirect_stderr(said),
          warnings.catch_warnings(), torch.random.fork_rng(devices=[])):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        yield said


def result_tensors(out) -> dict:  # what a function returned -> name or number -> tensor
    "The tensors and numbers of a result, in their order; a long list is one tensor."
    if isinstance(out, list) and len(out) > 3:
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            out = torch.stack([torch.as_tensor(x) for x in out])
    if isinstance(out, torch.Tensor): return {0: out}
    if hasattr(out, "_asdict"):
        out = out._asdict()
    elif hasattr(out, "__dataclass_fields__"):
        out = vars(out)
    items = out.items() if isinstance(out, dict) else enumerate(
        out if isinstance(out, (tuple, list)) else [out])
    found = {}
    for name, x in items:
        inner = isinstance(x, tuple) and any(getattr(y, "requires_grad", False) for y in x)
        parts = result_tensors(x).items() if inner else [(name, _tensor(x))]
        found |= {n if isinstance(n, str) else name: y for n, y in parts if y is not None}
    return found


def _tensor(x):
    if isinstance(x, torch.Tensor): return x
    if isinstance(x, (bool, str, dict)) or x is None: return None
    try: return torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError): return None


def same(a, b, tolerance: float = 1e-4) -> bool:  # two lists of tensors
    "True if all are equal up to rounding; NaN equals NaN."
    if len(a) != len(b) or any(x.shape != y.shape for x, y in zip(a, b)): return False
    scale = max([1e-12, *(y.detach().double().abs().nan_to_num(0, 0, 0).max().item() for y in b
                          if y.numel())])
    return all(torch.allclose(x.double(), y.double(), tolerance, 1e-2 * tolerance * scale,
                              equal_nan=True) for x, y in zip(a, b))


def _as_logits(logp):  # (B, T), below 0 -> (B, T, 2)
    "Logits whose first action has this log-probability; a NaN stays, and has no gradient."
    rest = torch.log1p(-torch.where(logp.isnan(), -1.0, logp).exp())
    return torch.stack([logp, torch.where(logp.isnan(), logp.detach(), rest)], -1)


def _as_gauss(logp, sigma=0.05):
    "Mean and deviation with which the action 0 has this log-density."
    mu = sigma * (-2 * (logp + math.log(sigma) + 0.5 * math.log(2 * math.pi))).sqrt()[..., None]
    return dict(mu=mu, sigma=torch.full_like(mu, sigma))


class Subject:
    "A function, the roles of its parameters, its options, and the dialect in which it is called."

    def __init__(self, function, names=None, options=None, layout=None, guessed=False):
        for plain in ("_orig_mod", "_torchdynamo_inline", "_torchdynamo_orig_callable"):
            function = getattr(function, plain, function)  # compiled: what it was made of
        self.function = function.forward if isinstance(function, torch.nn.Module) else function
        self.name = getattr(function, "__name__", type(function).__name__)
        self.parameters = self._signature(function)
        self.roles, self.batch = {}, None  # role -> parameter; the one whose keys they are
        self.vague = False  # whether the order alone says which of two is the new one
        for name, x in dict(names=names, options=options).items():
            if x is not None and not isinstance(x, dict):
                raise TypeError(f"{name} must be a dict or None, got {type(x).__name__}")
        self._open({*(options or {}), *(names or {}), *(names or {}).values()})
        self.given, self.layout = dict(options or {}), layout
        for name in self.given.keys() - self.parameters.keys():
            raise Unreadable(f"options must be parameters of {self.name}, got {name!r}; it has "
                             f"{', '.join(self.parameters)}")
        self._assign(names or {})
        self.dialect, self.printed, self.calls, self.changed = {}, "", 0, set()
        self.guessed = guessed  # the kind, from the names
        self.filled, self.unset = {}, {}  # options without a number -> the one they get here
        negative = any("neglogp" in parts_of(n) for n in self.roles.values())
        self.wants = {n: lambda x: -x for r, n in self.roles.items()  # parameter -> what it wants
                      if "logp" in r and negative or r == "log_ratio" and "kl" in n}

    def _signature(self, function):
        if not callable(function):
            raise TypeError(f"function must be callable, got {type(function).__name__}")
        if inspect.isclass(function):
            raise TypeError(f"function must be a function or an instance, got the class "
                            f"{function.__name__}: call it first")
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(f"function must return its result, got {self.name}, which yields or "
                            "has to be awaited")
        try:
            found = inspect.signature(self.function).parameters
        except (TypeError, ValueError) as e:
            raise TypeError(f"function must tell its parameters, got {self.name}: {e}") from e
        named = {n: p for n, p in found.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        if not named:
            raise TypeError(f"function must have named parameters, got {self.name}"
                            f"{inspect.signature(self.function)}; write lambda logp, old: ...")
        return named

    def _open(self, known):
        "Take the keys of a batch as parameters, where the function takes a batch."
        with quiet(0), time_limit(LIMIT):
            try:
                found = opened(self.function, self.parameters, known)
            except TimeoutError: return
        if found:
            self.function, self.parameters, self.batch = found

    def _assign(self, names):
        "Give each role its parameter: as `names` says, then by the parts of the names."
        told = {}
        for a, b in names.items():
            theirs, ours = (b, a) if b in self.parameters else (a, b)
            if theirs not in self.parameters:
                raise Unreadable(f"names must name parameters of {self.name}, got {a}={b}; it has "
                                 f"{', '.join(self.parameters)}")
            told[theirs] = role_of(ours) or ours
        self.unknown = []
        for name, p in self.parameters.items():
            plain = (p.default is EMPTY or p.default is None) and name not in self.given
            role = told.get(name) or (role_of(name) if plain else None)
            if role in self.roles:
                self._second(role, name)
            elif role:
                self.roles[role] = name
            elif p.default is EMPTY and name not in self.given:
                self.unknown.append(name)
        what = "value" if "returns" in self.roles else "logp"
        for name in [*self.unknown]:  # "new", "old"
            role = {("new",): what, ("old",): f"{what}_old", ("ref",): "logp_ref"}.get(
                (*parts_of(name),))
            if role and role not in self.roles:
                self.roles[role] = name
                self.unknown.remove(name)
        if "weight" in self.roles:
            self.roles.setdefault("mask", self.roles.pop("weight"))
        if "logits" in self.roles and "labels" not in self.roles and "index" in self.roles:
            self.roles["labels"] = self.roles.pop("index")

    def _second(self, role, name):
        "Two parameters of one role: that of the new policy says so, or stands first."
        old = {"logp": "logp_old", "logp_old": "logp_rollout", "value": "value_old",
               "done": "done_last"}.get(role)
        if old is None or old in self.roles:
            self.unknown += [name] * (self.parameters[name].default is EMPTY)
            return
        both = [self.roles[role], name]
        self.vague = not any("new" in parts_of(n) for n in both)
        both.sort(key=lambda n: not ({"new", "mb"} & {*parts_of(n)} or "prox" in n))
        self.roles[role], self.roles[old] = both

    def required(self) -> set:  # roles
        "Roles of the parameters without default."
        return {r for r, n in self.roles.items() if self.parameters[n].default is EMPTY}

    def guess(self) -> str | None:  # a kind, or None
        "The kind, from the roles."
        kind = kind_of_roles(set(self.roles), self.required())
        if self.roles and self.roles.keys() <= MASKS and len(self.unknown) == 1: return "x"
        discounted = "rewards" in self.roles and any("gamma" in n.lower() for n in self.parameters)
        aim = "rewards" if self.roles.get("rewards") == "R" and not discounted else "labels"
        if self.roles.keys() - MASKS - {"value_old"} == {"value", aim}:  # what values aim at
            self.roles["returns"] = self.roles.pop(aim)
            return "value_loss"
        if kind == "x" and self.roles.keys() & {"rewards", "returns"} and group_of(self.numbers):
            self.roles.setdefault("rewards", self.roles.pop("returns", None))
            return "group_advantage"
        if not discounted or kind not in ("x", "group_advantage"): return kind
        if "index" in self.roles: return "group_advantage"
        return "returns" if "mask" in self.roles else "gae"

    def take_logits(self):
        "Give the log-probabilities as logits, of one action and all others, or as Gaussians."
        gauss = any("gauss" in parts_of(n) for n in self.roles.values())
        if gauss:
            self.wants[self.roles["labels"]] = lambda x: x[..., None].double()
        for name in [n for n in self.roles if n.startswith("logits")]:
            self.roles[name.replace("logits", "logp")] = parameter = self.roles.pop(name)
            self.wants[parameter] = _as_gauss if gauss else _as_logits
        for name, p in self.parameters.items():
            if callable(p.default) and role_of(name.removesuffix("_fn")) == "logp":
                self.given.setdefault(name, selective_log_softmax)  # theirs may go row by row

    def doubt(self, what: str):
        "Unreadable if the kind is a guess, and the function does what none of that kind does."
        if self.guessed:
            raise Unreadable(f"kind must be given, as {self.name} gives {what}; it has "
                             f"{', '.join(self.parameters)}, understood as {self.understood()}")

    def prepare(self, supplied):  # roles that the reader has tensors for
        "Settle what the options without default get; Unreadable if a parameter is not understood."
        unknown = [*self.unknown, *(self.roles[r] for r in self.required() - set(supplied))]
        for name in dict.fromkeys(unknown):
            if name in self.given: continue
            self.filled[name] = usual_number(name)
            if self.filled[name] is None:
                self.refuse("names or options", name)

    def refuse(self, where: str, what: str):
        "Unreadable: the meaning of a parameter, or the parameter of a role, is not known."
        role = what.replace("|", " or ")
        is_what = (f"what {what} of {self.name} is" if what in self.parameters else
                   f"which parameter of {self.name} is {role}")
        raise Unreadable(f"{where} must say {is_what}; it has {', '.join(self.parameters)}, "
                         f"understood as {self.understood()}")

    def understood(self) -> str:
        "Parameters and their roles, for a message."
        return ", ".join(f"{name}: {role}" for role, name in self.roles.items()) or "nothing"

    def _options(self):
        values = {n: p.default for n, p in self.parameters.items()} | self.filled | self.given
        return {n: x for n, x in values.items() if n not in self.roles.values()}

    @property
    def numbers(self) -> dict:  # name -> value
        "The numeric options: given, by default, or filled in."
        return {n: x for n, x in self._options().items()
                if isinstance(x, (int, float)) and not isinstance(x, bool)}

    @property
    def switches(self) -> dict:  # name -> value
        "The options that are True, False, None or a string."
        return {n: x for n, x in self._options().items()
                if (x is None or isinstance(x, (bool, str))) and n not in self.unset}

    def cast(self, x):
        "A copy in the dialect's type and form: the function may change it."
        if not isinstance(x, torch.Tensor): return x
        how = self.dialect
        real = how.get("dtype", torch.float64)
        flag = dict(bool=torch.bool, float=real, int=torch.int64)[how.get("flags", "bool")]
        x = x.to(flag if x.dtype == torch.bool else real if x.is_floating_point() else x.dtype,
                 copy=True)
        if how.get("array") == "numpy": return x.detach().numpy()
        if how.get("array") == "list": return x.tolist()
        return x.flatten() if how.get("form") == "flat" else x

    def run(self, case: dict, **options):  # role -> value -> what the function returns
        "One call; exceptions become one sentence."
        values = self.filled | self.unset | self.given | {
            self.roles[role]: self.cast(x) for role, x in case.items() if role in self.roles}
        for name in self.wants.keys() & values.keys():
            values[name] = self.wants[name](values[name])
        values |= options
        args = [values.pop(n) for n, p in self.parameters.items()
                if p.kind is p.POSITIONAL_ONLY and n in values]
        tensors = {n: x for n, x in values.items() if isinstance(x, torch.Tensor)}
        before = {n: x.detach().clone() for n, x in tensors.items()}
        self.calls += 1
        with quiet(self.calls) as said:
            try:
                out = self.function(*args, **values)
            except TimeoutError:
                raise
            except (Exception, SystemExit) as e:
                text = str(e).strip().split("\n")[0][:200]
                shapes = ", ".join(f"{n} {tuple(x.shape)}" for n, x in tensors.items())
                raise Unreadable(f"{self.name} raised {type(e).__name__}: {text}; called with "
                                 f"{shapes or 'no tensor'}") from e
            finally:
                self.printed = self.printed or said.getvalue().strip()
        self.out = out
        self.changed |= {n for n, x in before.items() if not same([tensors[n].detach()], [x], 0)}
        return out

    def tune(self, tries: dict, probe):
        "Take the first dialect, one of each of `tries`, in which probe() gives a list of tensors."
        first, unset = None, {n: usual_number(n) for n, x in self.switches.items()
                              if x is None and usual_number(n) is not None}
        for filled in ({}, *({n: x} for n, x in unset.items()), unset)[:None if unset else 1]:
            self.unset = filled  # options of None that have to be numbers
            for choice in itertools.product(*tries.values()):
                self.dialect = dict(zip(tries, choice))
                try:
                    found = probe()
                except Unreadable as e:  # a wrong shape says less than what comes after it
                    first = e if first is None or "size of tensor" in str(first) else first
                else:
                    return self._check(found, probe())
        raise first

    def _check(self, one, again):
        if not same(one, again):
            raise Unreadable(f"{self.name} is random: two calls with the same input differ")
        if not all(bool(x.isfinite().all()) for x in one):
            raise Unreadable(f"{self.name} gives NaN or infinity on ordinary input")
