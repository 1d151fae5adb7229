"Right functions of forms that are not known here: what they do breaks no property."
import math

import torch
import torch.nn.functional as F
from planted import masked_mean as mean
from planted import rows

def centre(g): return g - g.mean(1, keepdim=True)
def z(g): return centre(g) / (g.std(1, keepdim=True) + 1e-4)
def entropy(x): return torch.distributions.Categorical(logits=x).entropy()
def median(g): return g.median(1, keepdim=True).values
def of_others(g): return (g.sum(1, True) - g) / (g.shape[1] - 1)
def shrunk(g, baseline):
    "Towards the mean of all prompts, by the share of noise in a mean's variance."
    noise = g.var(1, keepdim=True) / g.shape[1]
    weight = noise / (noise + g.mean(1).var())
    return (1 - weight) * baseline + weight * g.mean()
def clip(r, A): return torch.min(r * A, r.clamp(0.8, 1.2) * A)
def whole(x, m): return rows(x, m)[:, None]  # mean of a response's tokens


GROUPS = {  # (P, G) -> (P, G)
    "clipped": lambda g: z(g).clamp(-1, 1),
    "clipped on one side": lambda g: z(g).clamp(min=-0.5),
    "squashed": lambda g: centre(g).tanh(),
    "winsorised": lambda g: centre(g.clamp(g.quantile(0.1, 1, True), g.quantile(0.9, 1, True))),
    "median": lambda g: g - median(g),
    "median, deviation": lambda g: (g - median(g)) / g.std(1, keepdim=True),
    "by the mean": lambda g: centre(g) * g.mean(1, keepdim=True).sigmoid(),
    "by the share of good ones": lambda g: z(g) * (1 - (g > 0).double().mean(1, True) / 2),
    "best": lambda g: g - g.amax(1, keepdim=True),
    "first": lambda g: g - g[:, :1],
    "sign": lambda g: centre(g).sign(),
    "bad ones halved": lambda g: torch.where(centre(g) < 0, 0.5 * centre(g), centre(g)),
    "good ones alone": lambda g: centre(g).relu(),
    "softmax": lambda g: g.softmax(1) - 1 / g.shape[1],
    "root": lambda g: centre(g).sign() * centre(g).abs().sqrt(),
    "shrunk": lambda g: g - shrunk(g, g.mean(1, True)),
    "shrunk, deviation": lambda g: (g - shrunk(g, g.mean(1, True))) / g.std(1, keepdim=True),
    "shrunk, of the others": lambda g: g - shrunk(g, of_others(g)),
    "half of all": lambda g: g - (g.mean(1, True) + g.mean()) / 2,
    "trimmed": lambda g: g - (g.sum(1, True) - g.amax(1, True) - g.amin(1, True)) / 2,
}
SPREADS = {  # (P, G) -> (P, G): divided by another spread than a deviation
    "range": lambda g: centre(g) / (g.amax(1, True) - g.amin(1, True) + 1e-6),
    "mean deviation": lambda g: centre(g) / (centre(g).abs().mean(1, True) + 1e-6),
    "largest": lambda g: centre(g) / centre(g).abs().amax(1, True),
    "from the median": lambda g: (g - median(g)) / (g - median(g)).abs().mean(1, True),
    "median of them": lambda g: centre(g) / median((g - median(g)).abs()),
    "quartiles": lambda g: centre(g) / (g.quantile(0.75, 1, True) - g.quantile(0.25, 1, True)),
    "variance": lambda g: centre(g) / (g.var(1, keepdim=True) + 1e-6),
    "root": lambda g: centre(g) / g.std(1, keepdim=True).sqrt(),
}
ESTIMATES = {  # log pi - log pi_ref -> (B, T)
    "Jensen-Shannon": lambda d: 0.5 * (-d * (-d).exp() - ((-d).exp() + 1) * (
        ((-d).exp() + 1) / 2).log()),
    "to the mean of both": lambda d: math.log(2) - torch.log1p((-d).exp()),
    "Huber": lambda d: F.huber_loss(d, 0 * d, reduction="none"),
    "log cosh": lambda d: d.cosh().log(),
    "k2, capped": lambda d: (d.square() / 2).clamp(max=0.3),
    "k3, capped": lambda d: ((-d).exp() - 1 + d).clamp(max=0.5),
    "k1, squashed": lambda d: d.tanh(),
    "chi-square": lambda d: ((-d).exp() - 1).square() / 2,
    "Hellinger": lambda d: 2 * (1 - (-d / 2).exp()).square(),
    "total variation": lambda d: ((-d).exp() - 1).abs() / 2,
    "symmetric": lambda d: (1 - (-d).exp()) * d,
    "root": lambda d: (1 + d.square()).sqrt() - 1,
}
ERRORS = {  # V - R -> (B, T)
    "Huber": lambda e: F.huber_loss(e, 0 * e, reduction="none"),
    "log cosh": lambda e: e.cosh().log(),
    "absolute": lambda e: e.abs(),
    "quantile": lambda e: torch.where(e < 0, 0.7, 0.3) * e.abs(),
    "expectile": lambda e: torch.where(e < 0, 0.7, 0.3) * e.square(),
    "capped": lambda e: e.clamp(-0.5, 0.5).square(),
    "fourth power": lambda e: e**4,
    "Cauchy": lambda e: (1 + e.square()).log(),
}
OBJECTIVES = {  # ratio, A -> (B, T), to be maximised
    "squashed": lambda r, A: (r - 1).atan() * A,
    "in logarithms": lambda r, A: torch.min(r.log() * A, r.log().clamp(-0.2, 0.2) * A),
    "rolled back": lambda r, A: torch.min(r * A, (r.clamp(0.8, 1.2) - 0.3 * (
        r - r.clamp(0.8, 1.2))) * A),
    "parabola": lambda r, A: r * A - A.abs() / 0.4 * (r - 1).square(),
    "bad ones halved": lambda r, A: torch.where(A < 0, 0.5, 1.0) * torch.min(
        r * A, r.clamp(0.8, 1.2) * A),
    "by place": lambda r, A: torch.min(r * A, r.clamp(0.8, 1.2) * A) * 0.95 ** torch.arange(
        r.shape[1]),
    "penalised": lambda r, A: r * A - 0.2 * (r - 1 - r.log()),
    "mirror descent": lambda r, A: r.log() * A - 0.25 * r.log().square(),
    "root": lambda r, A: 2 * r.sqrt() * A,
    "good ones alone": lambda r, A: torch.min(r * A, r.clamp(0.8, 1.2) * A) * (A > 0),
    "bad ones alone": lambda r, A: torch.min(r * A, r.clamp(0.8, 1.2) * A) * (A < 0),
    "capped": lambda r, A: r.clamp(max=2) * A,
    "both capped": lambda r, A: (r * A).clamp(-5, 5),
    "A capped": lambda r, A: torch.min(r * A.clamp(-0.5, 0.5), r.clamp(0.8, 1.2) * A.clamp(-0.5,
                                                                                       0.5)),
    "softly capped": lambda r, A: 3 * (r / 3).tanh() * A,
    "saturated": lambda r, A: r / (1 + r / 3) * A,
    "tapered": lambda r, A: (-2 * (r - 1).abs()).exp().detach() * r * A,
    "in a band": lambda r, A: r * ((r > 0.5) & (r < 5)) * A,
    "dropped above": lambda r, A: torch.where(r > 2, 0, r).detach() * r.log() * A,
    "guarded": lambda r, A: r.log().clamp(-2, 2).exp() * A,
    "smooth clip": lambda r, A: torch.where(A > 0, 1 - (1 - r).exp(), (r - 1).exp() - 1) * A,
}
DROPS = {  # log-ratio, A, mask -> whether a token counts
    "mean in a band": lambda d, A, m: (whole(d, m).exp() - 1).abs() < 0.2,
    "mean in a wide band": lambda d, A, m: whole(d, m).abs() < 2.3,
    "mean ratio": lambda d, A, m: (whole(d.exp(), m) - 1).abs() < 0.3,
    "largest": lambda d, A, m: (d.abs() * m).amax(1, True) < 0.3,
    "k3": lambda d, A, m: whole(d.exp() - 1 - d, m) < 0.1,
    "small k3": lambda d, A, m: whole(d.exp() - 1 - d, m) < 0.005,
    "tokens": lambda d, A, m: (d.exp() - 1).abs() < 0.2,
}
BAD_ONES = {  # the same of responses with A < 0 alone, beside a clip
    "bad and unlikely": lambda d, A, m: (A >= 0) | (-whole(d, m) < 0.5),
    "bad and far": lambda d, A, m: (A >= 0) | (whole(d.exp() - 1 - d, m) < 0.1),
}
AGGREGATIONS = {  # losses, mask -> 0-dim
    "between": lambda x, m: 0.5 * mean(x, m) + 0.5 * rows(x, m).mean(),
    "by the root of the length": lambda x, m: ((x * m).sum(1) / m.sum(1).sqrt()).mean(),
    "worst token": lambda x, m: x.masked_fill(m == 0, -1e9).amax(1).mean(),
    "worst response": lambda x, m: rows(x, m).max(),
    "median": lambda x, m: x[m != 0].median(),
    "soft maximum": lambda x, m: x.masked_fill(m == 0, -1e9).logsumexp(1).mean(),
    "capped": lambda x, m: x[m != 0].clamp(-1, 1).mean(),
    "root of squares": lambda x, m: mean(x.square(), m).sqrt(),
}
WHITENED = {  # numbers, mask -> as many
    "clipped": lambda x, m: ((x - mean(x, m)) / x[m != 0].std()).clamp(-2, 2),
    "median": lambda x, m: (x - x[m != 0].median()) / (x - x[m != 0].median())[m != 0].abs().mean(),
    "least and most": lambda x, m: (x - x[m != 0].min()) / (x[m != 0].max() - x[m != 0].min()),
    "mean deviation": lambda x, m: (x - mean(x, m)) / mean((x - mean(x, m)).abs(), m),
    "largest": lambda x, m: x / (x * m).abs().max(),
    "root of squares": lambda x, m: x / mean(x.square(), m).sqrt(),
    "rows": lambda x, m: (x - rows(x, m)[:, None]) / rows((x - rows(x, m)[:, None]).square(),
                                                          m)[:, None].sqrt(),
}
ENTROPIES = {  # logits -> (B, T)
    "best five": lambda x: entropy(x.topk(5).values),
    "Renyi": lambda x: -(2 * x.log_softmax(-1)).logsumexp(-1),
    "Tsallis": lambda x: 1 - x.softmax(-1).square().sum(-1),
    "of its maximum": lambda x: entropy(x) / math.log(x.shape[-1]),
}
PREFERENCES = {  # lead -> (B,)
    "exponential": lambda h: (-0.1 * h).exp().clamp(max=50),
    "squared hinge": lambda h: (1 - 0.1 * h).relu().square(),
    "Huber": lambda h: F.smooth_l1_loss(h, 0 * h + 5, reduction="none"),
    "probit": lambda h: -torch.special.log_ndtr(0.1 * h),
    "arctangent": lambda h: -(0.1 * h).atan(),
    "squared sigmoid": lambda h: (-0.1 * h).sigmoid().square(),
}


def of_groups(f):
    return lambda rewards, num_generations=4: f(rewards.view(-1, num_generations)).flatten()


def dropped(keep, f=clip):  # what counts; ratio, A -> (B, T)
    def policy(logp, old_logp, advantages, mask):
        d, A = logp - old_logp, advantages[:, None]
        return -mean(f(d.exp(), A) * keep(d.detach(), A, mask), mask)
    return policy


def made():
    "(name, function) of each form, under the names that its kind has."
    def kl(f): return lambda logp, ref_logp: f(logp - ref_logp)
    def value(f): return lambda values, returns, mask: mean(f(values - returns), mask)
    def policy(f): return lambda logp, old_logp, advantages, mask: -mean(
        f((logp - old_logp).exp(), advantages[:, None]), mask)
    def aggregate(f): return lambda loss, mask: f(loss, mask)
    def whiten(f):
        def whiten(x, mask): return f(x, mask)
        return whiten
    def entropy(f): return lambda logits: f(logits)
    def preference(f): return lambda chosen_logps, rejected_logps, ref_chosen, ref_rejected: f(
        chosen_logps - rejected_logps - ref_chosen + ref_rejected).mean()
    for forms, make in ((GROUPS, of_groups), (ESTIMATES, kl), (ERRORS, value), (OBJECTIVES, policy),
                        (AGGREGATIONS, aggregate), (WHITENED, whiten), (ENTROPIES, entropy),
                        (PREFERENCES, preference)):
        for name, form in forms.items():
            yield f"{make.__name__}: {name}", make(form)
    for name, keep in (DROPS | BAD_ONES).items():
        yield f"dropped: {name}", dropped(keep)
    for name, keep in DROPS.items():
        yield f"dropped, no clip: {name}", dropped(keep, torch.mul)
