"""GAE and discounted returns, read from the response to single rewards and values."""

__all__ = ["read_gae"]

from itertools import combinations

import torch

from ..formulas.advantage import gae
from ..formulas.whitening import whiten
from .calls import Unreadable, result_tensors
from .probing import DTYPES, check_repeatable, noise, report_dead, same
from .report import Report, number

T, N = 8, 11  # steps and environments, or tokens and responses
ENDS = ("done", "terminated", "truncated", "not_done", "starts", "done_last", "not_done_last")
SUPPLIED = "rewards value next_value mask padding lengths logp logp_ref returns advantage".split()


class Steps:
    "A function of rewards, values and ends, called with arrays (T, N) whose time comes first."

    def __init__(self, subject):
        self.subject, self.roles = subject, subject.roles
        if "mask" in self.roles and "next_value" in self.roles and not self.ends:
            self.roles["not_done"] = self.roles.pop("mask")  # 0 where the episode ended
        subject.prepare((*SUPPLIED, *ENDS))

    @property
    def ends(self): return self.roles.keys() & set(ENDS)

    @property
    def tokens(self): return bool(self.roles.keys() & {"mask", "padding", "lengths"})

    @property
    def each(self):
        "Whether every step has a next value of its own."
        return "next_value" in self.roles and self.subject.dialect["next"] == "each"

    @property
    def follows(self):
        "Whether the value after the last step is known."
        return "next_value" in self.roles or self.subject.dialect["length"] == "T+1"

    def __call__(self, r, v, nv, terminated=None, done=None, mask=None, **options):
        "Results by name; nv[t] = V of what step t led to."
        no, how = torch.zeros(r.shape, dtype=torch.bool), self.subject.dialect
        terminated = no if terminated is None else terminated
        done = terminated if done is None else done
        mask = ~no if mask is None else mask
        case = dict(rewards=r, value=v, mask=mask, padding=~mask, lengths=mask.sum(0))
        case["next_value"] = dict(each=nv, last=nv[-1], row=nv[-1:])[how["next"]]
        if how["length"] == "T+1":
            case["value"] = torch.cat([v, nv[-1:]])
        case |= self._ends(terminated, done)
        case = {role: self._shaped(x) for role, x in case.items() if role in self.roles}
        return self._results(result_tensors(self.subject.run(case, **options)), r.shape)

    def _ends(self, terminated, done):
        "Each flag in its convention: of this step, or of the observation before it."
        before = torch.cat([torch.zeros_like(done[:1]), done[:-1]])
        here = before if self.ends & {"done_last", "not_done_last"} else done
        here = done[-1] if "starts" in self.roles else here
        alone = not self.ends - {"terminated"}
        return dict(done=here, not_done=~here, starts=before, done_last=done[-1],
                    not_done_last=~done[-1], terminated=here if alone else terminated,
                    truncated=done if not self.ends - {"truncated"} else done & ~terminated)

    def _shaped(self, x):
        "In the dialect's layout and dtype."
        how = self.subject.dialect
        kind = DTYPES[how["ends"]] if x.dtype == torch.bool else x.dtype
        x = x.to(how["dtype"] if kind == torch.float64 else kind, copy=True)  # it may be changed
        if how["layout"] == "1d": return x[..., 0]
        return x.T.contiguous() if how["layout"] == "BT" and x.ndim == 2 else x

    def _results(self, out, shape):
        "The results that have as many numbers as the rewards."
        layout, found = self.subject.dialect["layout"], {}
        wanted = dict(TN=shape, BT=shape[::-1]).get(layout, shape[:1])
        for name, x in out.items():
            if x.shape == wanted:
                x = x.T if layout == "BT" else x[:, None].expand(shape) if x.ndim == 1 else x
                found[name] = x.detach().double()
        if found and sum(x.ndim > 0 for x in out.values()) < 3: return found
        got = ", ".join(str(tuple(x.shape)) for x in out.values()) or "nothing"
        raise Unreadable(f"{self.subject.name} returned {got}; expected advantages, or advantages "
                         "and returns, in the shape of the rewards")

    def tune(self):
        "Find shapes, dtypes and the layout: time runs where one reward spreads."
        layouts = [self.subject.layout] if self.subject.layout else ["TN", "BT"]
        plural = self.roles.get("next_value", "").lower().endswith("s")
        nexts = ["last", "row", "each"] if "next_value" in self.roles else ["last"]
        if plural and not self.ends & {"starts", "done_last"}:
            nexts = ["each", "last", "row"]
        tries = dict(layout=layouts + ["1d"] * (self.subject.layout != "BT"),
                     dtype=(torch.float64, torch.float32),
                     length=("T", "T+1") if "value" in self.roles else ("T",), next=nexts,
                     ends=("bool", "float", "int") if self.ends or self.tokens else ("bool",))
        self.subject.tune(tries, self._try)
        check_repeatable(self.subject.name, lambda: [*self(*_draws()).values()])

    def _try(self, dialect):
        "Unreadable if time runs elsewhere, or if each step takes the one value after the last."
        r, v, nv = _draws()
        base = self(r, v, nv)
        if dialect["layout"] == "1d": return
        across = along = False
        for part in (dict(r=_plus(r)), dict(v=_plus(v))):
            for a, b in zip(base.values(), self(**dict(r=r, v=v, nv=nv) | part).values()):
                moved = (a - b).abs() > 1e-7
                if moved.all() and len(base) == 1:  # whitened: the names alone tell
                    across, along = (dialect["layout"] == "BT") != self.tokens, True
                elif not moved.all():
                    along |= bool(moved[:5, 4].any())
                    across |= bool(moved[:, torch.arange(N) != 4].any())
        if across or not along and dialect["next"] != "each":
            raise Unreadable(f"{self.subject.name} takes each step by itself, or another layout; "
                             "expected sums over later steps")
        if dialect["next"] != "each" and "next_value" in self.roles:
            for name in base:
                R, V, L = (_response(self, name, of) for of in ("r", "v", "nv"))
                if L.any() and V[3, 3].abs() > 1e-6 and (V[2, 3] + R[2, 3]).abs() < 1e-6:
                    raise Unreadable(f"{self.subject.name} takes one next value in every step")


def _draws(seed=1): return [noise(T, N, seed=seed + i) for i in range(3)]


def _plus(x): return x + 3 * torch.zeros_like(x).index_put((torch.tensor(5), torch.tensor(4)),
                                                           torch.tensor(1.0).double())


def _response(steps, name, of):
    "R[t, s]: change of the result at t per unit of a reward, value or next value at s."
    zero = torch.zeros(T, N, dtype=torch.float64)
    def run(x): return steps(**dict(r=zero, v=zero, nv=zero) | {of: x})[name]
    eye = torch.eye(T, N, dtype=torch.float64)
    if steps.subject.dialect["layout"] != "1d": return (run(eye) - run(zero))[:, :T]
    columns = [eye[:, s:s + 1].expand(T, N) for s in range(T)]
    return torch.stack([(run(x) - run(zero))[:, 0] for x in columns], 1)


def read_gae(subject) -> Report:
    "Read GAE or discounted returns."
    report = Report("gae", subject.name, axes=("steps later", "response of the advantage"))
    steps = Steps(subject)
    steps.tune()
    results = [*steps(*_draws())]
    own = {n: _response(steps, n, "v").diagonal()[:-1].mean().item() for n in results}
    most = max(results, key=lambda n: abs(own[n]))
    adv = next((n for n in results if "adv" in str(n).lower()), most)
    ret = next((n for n in results if n != adv), None)
    whitened = _whitened(report, steps, adv, ret)
    if whitened and ret is None:
        _guess_whitened(steps, adv, report)
    else:
        is_return = ret is None and "value" in steps.roles and _is_return(steps, adv)
        source = ret if whitened else adv
        _read_steps(report, _Minus(steps) if whitened or is_return else steps, source)
        report.facts |= {"whitened": whitened} if whitened else {}
        if ret is not None and not whitened:
            _returns(report, steps, adv, ret)
    flags = noise(T, N, seed=7) > 0.8
    report_dead(report, subject, lambda **o: [*steps(*_draws(), flags, **o).values()])
    return report


class _Minus:
    "Returns less values, in the place of the advantages."

    def __init__(self, steps):
        self.steps = steps
    def __getattr__(self, name): return getattr(self.steps, name)

    def __call__(self, r, v, *rest, **more):
        return {name: x - v for name, x in self.steps(r, v, *rest, **more).items()}


def _is_return(steps, name):
    "True for a lone result that is advantage plus value: a value has no effect at its own step."
    V, L = (_response(steps, name, of) for of in ("v", "nv"))
    return bool(V.diagonal()[:-1].abs().max() < 1e-6) and bool(V.any() or L.any())


def _whitened(report, steps, adv, ret):
    "The deviation by which the advantages are divided, None if they are as they were."
    draws = [x[:, :1].expand(T, N) if steps.subject.dialect["layout"] == "1d" else x
             for x in _draws()]
    out = steps(*draws)
    for deviation in ("population", "sample") if ret is not None else ():
        for shift in (True, False):
            white = whiten(out[ret] - draws[1], None, shift, deviation == "sample", 0.0)
            if not same([out[adv]], [white], 1e-3): continue
            if not shift:
                report.find("baseline", SAYS["mean kept"])
            return deviation
    if not same([out[adv]], [steps(*(3 * x for x in draws))[adv]], 1e-3): return None
    return "unknown"


def _guess_whitened(steps, adv, report):
    "Whitened advantages without returns: compare with the options' own gamma and lambda."
    report.nearest, numbers, (r, v, nv) = "gae", steps.subject.numbers, _draws()
    def option(*parts):
        return next((min(x, 1.0) for n, x in numbers.items() if n.lower().startswith(parts)), 1.0)
    gamma, lam, no = option("gam", "disc"), option("lam", "lmb", "gae_l"), noise(T, N) > 9
    for last in (nv[-1:], 0 * nv[-1:]):
        following = torch.cat([v[1:], last])
        A, got = gae(r, v, following, no, no, gamma, lam)[0], steps(r, v, following)[adv]
        if any(same([got], [whiten(A, unbiased=u)], 1e-3) for u in (True, False)):
            report.formula = "gae_tokens" if steps.tokens else "gae"
            report.facts.update(gamma=gamma, lam=lam, bootstrap=bool(last.any()), whitened=True)
            return


def _read_steps(report, steps, name):
    "gamma and lambda from the responses; then the faults, as the variant that equals it."
    facts, has_values = report.facts, "value" in steps.roles
    R, V, L = (_response(steps, name, of) for of in ("r", "v", "nv"))
    scale = _scale(report, R)
    if not scale: return
    R, V, L = R / scale, V / scale, L / scale
    gl = R[0, 1].item()
    gamma = (L[0, 0] if steps.each else V[0, 1] + gl).item() if has_values else gl
    lam = gl / gamma if abs(gamma) > 1e-9 else 0.0
    facts.update(gamma=number(gamma), **({"lam": number(lam)} if has_values else {}))
    report.curves = {"": (torch.arange(T), R[0], gl ** torch.arange(T).double())}
    if _plain(report, R, V, gl, gamma, steps.each or not has_values):
        faults = _ending(steps, name, scale, gamma, lam, has_values)
        facts["bootstrap"] = bool(steps.follows and "no-bootstrap" not in (faults or ""))
        for kind in faults or ():
            report.find(kind, SAYS[kind])
        if faults is None and _leaps(steps, name):
            report.find("ends-ignored", SAYS["ends-ignored"])
        report.nearest = "gae" if faults is None else None
    if steps.tokens:
        _tokens(report, steps, name)
    if not report.findings and not report.nearest:
        known = "gae_tokens" if steps.tokens else "gae"
        report.formula = known if has_values else "discounted_returns"


def _scale(report, R):
    "By what a reward of 1 changes the advantage of its own step."
    own = R.diagonal()
    if not R.any():
        report.find("no-gradient", "a reward of 1 changes no result")
    elif own.abs().max() < 1e-9 or (own[:-1] - own.mean()).abs().max() > 1e-3:
        report.find("off-by-one", f"a reward of 1 at step 2 changes its advantage by {own[2]:.3g}, "
                    f"at the last step by {own[-1]:.3g}; the formula gives 1 and 1")
    elif own.mean() < 0 or abs(own.mean() - 1) > 1e-3:
        kind = "sign" if own.mean() < 0 else "scale"
        report.find(kind, f"a reward of 1 changes its advantage by {own.mean():.4g}, not by 1")
        return own.mean().item()
    else: return 1.0


def _plain(report, R, V, gl, gamma, apart):
    "Without ends: powers of gamma lambda, and TD errors with the right values."
    k = torch.arange(T)[None] - torch.arange(T)[:, None]
    P = torch.where(k >= 0, torch.tensor(gl).double() ** k.clamp(min=0), 0.0)
    shift = torch.diag(torch.ones(T - 1).double(), 1)
    values = P @ ((0 if apart else gamma) * shift - torch.eye(T).double())
    if not same([R], [P], 1e-3):
        report.find("off-by-one", f"a reward of 1 reaches its step and those before it as "
                    f"{_list(R[:4, 3].flip(0))}; the formula gives {_list(P[:4, 3].flip(0))}")
    elif V.abs().max() < 1e-9 and not apart:
        report.find("baseline", "a value of 1 changes no advantage; the formula subtracts it")
    elif V.any() and not same([V[:, :-1]], [values[:, :-1]], 1e-3):
        report.find("off-by-one", f"a value of 1 changes the advantages of its step and those "
                    f"before it by {_list(V[:4, 3].flip(0))}; the formula gives "
                    f"{_list(values[:4, 3].flip(0))}")
    else: return True


def _list(x): return ", ".join(f"{y:.3g}" for y in x.tolist())


def _last(): return torch.arange(T)[:, None].expand(T, N) == T - 1


def _earlier(x): return torch.cat([x[1:], torch.zeros_like(x[:1])])


def _later(x): return torch.cat([torch.zeros_like(x[:1]), x[:-1]])


def _later_but_last(x): return torch.cat([_later(x)[:-1], x[-1:]])


ENDINGS = (  # fault, (terminated, done) -> what a function with it takes for them
    ("no-bootstrap", lambda end, done: (end | _last(), done)),
    ("no-bootstrap", lambda end, done: (done, done)),
    ("no-bootstrap", lambda end, done: (done | _last(), done)),
    ("ends-ignored", lambda end, done: (end, done & ~done)),
    ("bootstrap-past-end", lambda end, done: (end & ~end, done)),
    ("bootstrap-past-end", lambda end, done: (end & ~_last(), done & ~_last())),
    ("off-by-one", lambda end, done: (_earlier(end), _earlier(done))),
    ("off-by-one", lambda end, done: (_later(end), _later(done))),
    ("off-by-one", lambda end, done: (_later_but_last(end), _later_but_last(done))),
    ("off-by-one", lambda end, done: (end, _earlier(done))),
    ("off-by-one", lambda end, done: (_earlier(end), done)),
)
SAYS = {
    "no-bootstrap": "V of what follows a cut that is no end is 1: the advantage before the cut "
                    "changes by 0, the formula gives gamma",
    "ends-ignored": "an episode ends, the next step earns 1: the advantage before the end changes "
                    "by gamma lambda, the formula gives 0",
    "bootstrap-past-end": "an episode ends, V of what follows is 1: the advantage of its last step "
                          "changes by gamma, the formula gives 0",
    "mean kept": "the advantages are divided by their deviation, and keep their mean; whitening "
                 "removes it",
    "off-by-one": "an episode ends: the sum is cut one step beside its last step",
}


def _ending(steps, name, scale, gamma, lam, has_values):
    "The faults, at most two, with which our GAE equals the function; None if none do."
    r, v, nv = _draws(4)
    done = noise(T, N, seed=8) > 0.4
    end = done & (noise(T, N, seed=9) > 0) if "truncated" in steps.roles else done
    end, done = (x & (steps.each | ~_last() | (noise(T, N, seed=10) > 0)) for x in (end, done))
    if not steps.ends:
        end = done = torch.zeros_like(done)
    nv = nv if steps.each else torch.cat([v[1:], nv[-1:]])
    if not has_values:
        v, nv, lam = 0 * v, 0 * nv, 1.0
    got = steps(r, v, nv, end, done)[name] / scale
    for n in range(3):
        for faults in combinations(ENDINGS, n):
            e, d = end, done
            for _, change in faults:
                e, d = change(e, d)
            e = e if steps.follows else e | _last()
            expected = _advantages(r, v, nv, e, d, gamma, lam)
            if same([got[:, :1]], [expected[:, :1]], 1e-3) and (
                    steps.subject.dialect["layout"] == "1d" or same([got], [expected], 1e-3)):
                return tuple(dict.fromkeys(kind for kind, _ in faults))


def _leaps(steps, name):
    "Whether a reward after an end reaches the advantages before it."
    r, v, nv = _draws()
    at = torch.arange(T)[:, None].expand(T, N)
    end, later = at == 3, steps(r + (at > 3), v, nv, at == 3)[name]
    return not same([later[:4]], [steps(r, v, nv, end)[name][:4]], 1e-3)


def _advantages(r, v, nv, end, done, gamma, lam):
    "Our GAE; its own function wants gamma and lambda within [0, 1]."
    out, last = [], 0
    delta = r + gamma * nv * ~end - v
    for t in reversed(range(T)):
        last = delta[t] + gamma * lam * ~done[t] * last
        out.append(last)
    return torch.stack(out[::-1])


def _tokens(report, steps, name):
    "Padding after the last token: no value and no reward there may reach a token."
    lengths = torch.tensor([5, T, 6, 3, 4, 7, 2, 6, 5, 4, T])
    mask = torch.arange(T)[:, None] < lengths
    r, v, nv = (x * mask for x in _draws())
    clean, junk = steps(r, v, nv, mask=mask)[name], 3 * (~mask).double()
    for what, more in (("values", (0, 1)), ("rewards", (1, 0))):
        got = steps(r + more[0] * junk, v + more[1] * junk, nv, mask=mask)[name]
        if same([got * mask], [clean * mask]): continue
        whole = steps(r + more[0] * junk, v + more[1] * junk, nv)[name]
        used = not same([*steps(r, v, nv, mask=mask).values()], [*steps(r, v, nv).values()])
        kind = "mask-leak" if used or not same([got], [whole]) else "mask-ignored"
        return report.find(kind, f"{what} of 3 in the padding change the advantages of the tokens")


def _returns(report, steps, adv, ret):
    "Whether the returns are advantages plus values."
    draws = _draws(4)
    if steps.subject.dialect["layout"] == "1d":
        draws = [x[:, :1].expand(T, N) for x in draws]
    out, v = steps(*draws), draws[1]
    if "value" not in steps.roles or same([out[ret]], [out[adv] + v], 1e-3): return
    if same([out[ret]], [out[adv]], 1e-3):
        return report.find("baseline", "the returns are the advantages; the formula adds V")
    if same([out[ret][:-1]], [out[adv][:-1] + v[1:]], 1e-3):
        return report.find("off-by-one", "the returns add the value of the next step")
    R = _response(steps, ret, "r")
    if R.diagonal().allclose(torch.ones(T).double(), 1e-3):
        report.facts["value_lam"] = number(R[0, 1].item() / (report.facts.get("gamma") or 1))
    else:
        report.notes.append("the second result is neither advantages plus values nor returns")
