"""The whole policy as one module of PyTorch, for `torch.export`, ONNX and `torch.compile`.

    policy = PPO.load("mine.pt").export()
    actions = policy(obs)                                    # as `predict` on a batch
    torch.export.export(policy, (obs,))
    torch.onnx.export(policy, (obs,), "mine.onnx")           # wants onnx and onnxscript

For ONNX a dict of observations is given as `kwargs=dict(obs=obs)`, with `args=()`: a dict at the
end of `args` is taken for keywords.

It holds what lies between an observation and the action that the environment is told: bytes over
255, whole numbers as ones and zeros, running moments, the network, the mask, the most probable
action, and its bounds by clipping or tanh.
"""

__all__ = ['WholePolicy']

import copy

import torch
from gymnasium.spaces import Discrete, MultiBinary, MultiDiscrete
from torch import nn
from torch.nn import functional as F

from .policy import Bernoulli, Categorical, Gaussian, MultiCategorical, masked
from .spaces import parts, picture_is_last, scale_of


class WholePolicy(nn.Module):
    "The most probable actions for observations as the environment gives them."

    def __init__(self, agent, scaling, spaces):
        super().__init__()
        observations, _ = spaces
        self.net = copy.deepcopy(agent.whole_policy()).eval()
        self.columns = nn.ModuleList(map(Columns, parts(observations).values()))
        self.names = [*parts(observations)]
        self.limit, self.scales = scaling.LIMIT, False
        if scaling.config.normalize_obs and scaling.seen.count:
            self.scales = True
            self.register_buffer("mean", scaling.seen.mean.clone())
            self.register_buffer("std", (scaling.seen.var + 1e-8).sqrt())
        self.decide = Decide(agent.head)
        self.requires_grad_(False)
        self.to(next(agent.parameters()).device)

    def forward(self, obs, mask=None):
        """Actions (N, ...) of observations (N, ...): a tensor, or a dict of them for a Dict;
        `mask` (N, n), for Discrete actions: the possible ones.
        """
        entries = [obs] if self.names == [None] else [obs[name] for name in self.names]
        rows = torch.cat([column(x) for column, x in zip(self.columns, entries)], -1)
        if self.scales:
            rows = ((rows - self.mean) / self.std).clamp(-self.limit, self.limit)
        return self.decide(masked(self.net(rows.float()), mask))


class Columns(nn.Module):
    "Observations of one space as rows of numbers, as `row_maker` has them."

    def __init__(self, space):
        super().__init__()
        self.scale, self.last, self.nvec = scale_of(space), picture_is_last(space), None
        if isinstance(space, (Discrete, MultiDiscrete)):
            one = isinstance(space, Discrete)
            nvec = [int(space.n)] if one else space.nvec.ravel().tolist()
            start = [int(space.start)] if one else space.start.ravel().tolist()
            self.nvec = nvec
            self.register_buffer("start", torch.tensor(start))
        self.exact = not (self.nvec or isinstance(space, MultiBinary)) and space.dtype == "float64"

    def forward(self, x):  # (N, ...) -> (N, numbers)
        "Whole numbers as ones and zeros; pictures with channels first; bytes from 0 to 1."
        if self.nvec:
            whole = x.reshape(x.shape[0], -1).long() - self.start
            hot = [F.one_hot(whole[:, i], n) for i, n in enumerate(self.nvec)]
            return torch.cat(hot, -1).float()
        x = x.movedim(-1, 1) if self.last else x
        x = x.flatten(1) if x.ndim > 1 else x[:, None]
        return x.to(torch.float64 if self.exact else torch.float32) / self.scale


class Decide(nn.Module):
    "The most probable actions, as the environment has them, from the parameters of a distribution."

    def __init__(self, head):
        super().__init__()
        self.head = copy.deepcopy(head)
        if isinstance(head, MultiCategorical):
            self.register_buffer("start", torch.as_tensor(head.space.start))
        if isinstance(head, Gaussian):
            self.register_buffer("low", torch.from_numpy(head.low.copy()))
            self.register_buffer("high", torch.from_numpy(head.high.copy()))

    def forward(self, out):
        head = self.head
        if isinstance(head, Categorical): return out.argmax(-1) + head.start
        if isinstance(head, MultiCategorical):
            chosen = torch.stack([z.argmax(-1) for z in out.split(head.sizes, -1)], -1)
            return chosen.reshape(-1, *head.space.shape) + self.start
        if isinstance(head, Bernoulli): return (out > 0).to(torch.int8).reshape(-1, *head.shape)
        if head.squash:
            out = self.low + (out.tanh() + 1) / 2 * (self.high - self.low)
        return out.clamp(self.low, self.high).to(self.low).reshape(-1, *head.shape)
