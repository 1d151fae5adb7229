"""One iteration of `PPO` beside the same one in plain PyTorch, as CleanRL computes it.

    pip install 'gymnasium[mujoco]'
    python benchmarks/papers_update.py        # ten seconds

Writes nbs/studies/results/papers_update.csv: both begin with the same weights and take the same 80
minibatches of the same rollout of Hopper; `share` is the largest difference of a weight afterwards,
divided by the largest movement in its tensor, of all tensors the largest. The deviation of the
advantages is the sample's (n - 1, CleanRL's) or the population's (n, ours).
"""
from copy import deepcopy

import torch
from jobs import RESULTS, text, write
from torch.distributions import Normal

from rlhf_notes import PPO
from rlhf_notes.control.config import MUJOCO
from rlhf_notes.control.ppo import make_batch
from rlhf_notes.control.rollout import minibatches

def plain_loss(agent, batch, unbiased):
    "The loss of a minibatch by torch.distributions; clip 0.2, value_coef 0.5."
    value, pi = agent.critic(batch.obs).flatten(), Normal(agent.policy(batch.obs),
                                                          agent.head.log_std.exp())
    ratio = (pi.log_prob(batch.actions).sum(-1) - batch.logp).exp()
    adv = batch.advantages - batch.advantages.mean()
    adv = adv / (adv.std(unbiased=unbiased) + 1e-8)
    surrogate = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
    near = batch.values + (value - batch.values).clamp(-0.2, 0.2)
    errors = torch.maximum((value - batch.returns) ** 2, (near - batch.returns) ** 2)
    return 0.5 * 0.5 * errors.mean() - surrogate


def share(seed, unbiased):
    ppo = PPO("Hopper-v4", seed=seed, **{**MUJOCO, "num_steps": 512, "minibatches": 8})
    batch = make_batch(ppo.agent, ppo.collect()[0], ppo.config)
    clip = ppo.anneal("clip")
    ppo.optimizer.tie()
    plain, start = deepcopy(ppo.agent), deepcopy(ppo.agent)
    adam = torch.optim.Adam(plain.parameters(), lr=ppo.anneal("learning_rate"), eps=1e-5)
    for _ in range(ppo.config.epochs):
        for rows in minibatches(len(batch), ppo.config.minibatches, ppo.generator):
            ppo.step(batch[rows], clip)
            adam.zero_grad()
            plain_loss(plain, batch[rows], unbiased).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            adam.step()
    found = zip(*(agent.parameters() for agent in (ppo.agent, plain, start)))
    return max(((a - b).abs().max() / (b - c).abs().max()).item() for a, b, c in found)


def main():
    torch.set_num_threads(1)
    rows = [(name, seed, text(share(seed, unbiased))) for seed in range(5)
            for name, unbiased in (("sample", True), ("population", False))]
    write(RESULTS / "papers_update.csv", ("deviation", "seed", "share"), rows)
    print(*rows, sep="\n")


if __name__ == "__main__": main()
