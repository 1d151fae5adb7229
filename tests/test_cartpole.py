import json
import math
import signal
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from matplotlib.figure import Figure

from rlhf_notes.control import cartpole
from rlhf_notes.control.cartpole import PPO, Agent, Batch, evaluate, health, make_batch, ppo_loss, seeds, train
from rlhf_notes.control.config import PPOConfig
from rlhf_notes.control.rollout import Collector, make_envs
from rlhf_notes.runs import Run
from strategies import SEEDS

SMALL = PPOConfig(seed=3, steps=8 * 128, num_envs=4, num_steps=32, epochs=2)      # eight iterations in a moment


def agent(seed=0): return Agent(4, 2, torch.Generator().manual_seed(seed))


def some_batch(seed=0, size=40, keep=0.8):
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=g)
    valid = torch.rand(size, generator=g) < keep
    valid[0] = True
    return Batch(normal(size, 4), torch.randint(2, (size,), generator=g), math.log(0.5) + 0.3 * normal(size), normal(size), 3 * normal(size) + 1, 2 * normal(size), valid)


def loss_and_grad(a, batch, config):
    a.zero_grad()
    loss, parts = ppo_loss(a, batch, config)
    loss.backward()
    return loss.item(), {k: v.item() for k, v in parts.items()}, torch.cat([p.grad.flatten() for p in a.parameters()])


# the loss

@settings(max_examples=30)
@given(seed=SEEDS, clip=st.sampled_from([0.1, 0.2, 1.0]), entropy_coef=st.sampled_from([0.0, 0.01, 1.0]), value_coef=st.sampled_from([0.0, 0.5, 2.0]))
def test_loss_equals_the_loops(seed, clip, entropy_coef, value_coef):
    a, b = agent(seed % 7), some_batch(seed)
    config = replace(SMALL, clip=clip, entropy_coef=entropy_coef, value_coef=value_coef)
    logits, values = a.policy(b.obs).detach().double().tolist(), a.critic(b.obs).detach().double()[:, 0].tolist()
    rows = [i for i in range(len(values)) if b.valid[i]]
    advantage = b.advantages.double()[b.valid]
    mean, std = advantage.mean().item(), advantage.std(correction=0).item()
    policy = value = entropy = 0.0
    for i in rows:
        top = max(logits[i])
        logp = [z - top - math.log(sum(math.exp(y - top) for y in logits[i])) for z in logits[i]]
        ratio, A = math.exp(logp[b.actions[i]] - b.logp[i].item()), (b.advantages[i].item() - mean) / std
        policy -= min(ratio * A, min(max(ratio, 1 - clip), 1 + clip) * A) / len(rows)
        value += 0.5 * (values[i] - b.returns[i].item()) ** 2 / len(rows)
        entropy -= sum(math.exp(l) * l for l in logp) / len(rows)
    loss, parts, _ = loss_and_grad(a, b, config)
    assert parts == pytest.approx(dict(policy_loss=policy, value_loss=value, entropy=entropy), abs=2e-5, rel=1e-4)
    assert loss == pytest.approx(policy + value_coef * value - entropy_coef * entropy, abs=2e-5, rel=1e-4)


@pytest.mark.parametrize("junk", [1e30, math.nan, math.inf])
def test_masked_steps_have_no_influence(junk):
    a, b, config = agent(), some_batch(), replace(SMALL, entropy_coef=0.01)
    spoil = lambda x: torch.where(b.valid, x, junk)
    dirty = Batch(b.obs, torch.where(b.valid, b.actions, 1 - b.actions), spoil(b.logp), spoil(b.values), spoil(b.advantages), spoil(b.returns), b.valid)
    clean_loss, clean_parts, clean_grad = loss_and_grad(a, b, config)
    loss, parts, grad = loss_and_grad(a, dirty, config)
    assert loss == clean_loss and parts == clean_parts and torch.equal(grad, clean_grad) and grad.isfinite().all()
    assert health(a, dirty, 0.2) == health(a, b, 0.2)


FORMULAS = {
    "importance_ratio": lambda logp, old, mask: torch.ones_like(logp), "clipped_surrogate": lambda ratio, A, clip: torch.zeros_like(A), "whiten": lambda x, mask: x,
    "value_loss": lambda v, old, returns: v, "entropy_from_logits": lambda logits: logits.square().sum(-1), "selective_log_softmax": lambda logits, i: logits.sum(-1), "masked_mean": lambda x, mask: x.sum(),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_the_loss_calls_the_formula(monkeypatch, name):
    a, b, config = agent(), some_batch(), replace(SMALL, entropy_coef=0.1)
    _, _, right = loss_and_grad(a, b, config)
    monkeypatch.setattr(cartpole, name, FORMULAS[name])
    _, _, broken = loss_and_grad(a, b, config)
    assert not torch.allclose(right, broken)


def test_the_batch_and_the_metrics_call_theirs(monkeypatch):
    rollout, _ = Collector(make_envs("CartPole-v1", 4), 0).collect(agent().act, 32)
    seen = {}
    monkeypatch.setattr(cartpole, "gae", lambda *args: seen.setdefault("gae", args)[:2])
    b = make_batch(agent(), rollout, 0.9, 0.8)
    rewards, values, next_values, terminated, done, gamma, lam = seen["gae"]
    assert torch.equal(values, agent().value(rollout.obs)) and torch.equal(next_values, agent().value(rollout.next_obs)) and (gamma, lam) == (0.9, 0.8)
    assert torch.equal(terminated, rollout.terminated) and (done == (rollout.done | ~rollout.valid)).all()
    assert torch.equal(b.advantages, rewards.flatten()) and torch.equal(b.returns, values.flatten())
    for name, column in (("kl_estimate", "kl_k3"), ("clip_fraction", "clip_fraction"), ("explained_variance", "explained_variance")):
        monkeypatch.setattr(cartpole, name, lambda *args, shape=(128,) if column == "kl_k3" else (), **kwargs: torch.full(shape, 42.0))
        assert health(agent(), b, 0.2)[column] == 42


def test_health_measures_the_move_on_what_is_valid():
    a, b = agent(), some_batch(keep=0.6)
    logp = a.policy(b.obs).log_softmax(-1).gather(-1, b.actions[:, None])[:, 0].detach()
    ratio, A = (logp - b.logp).exp()[b.valid], b.advantages[b.valid] - b.advantages[b.valid].mean()
    d = b.logp[b.valid] - logp[b.valid]                                     # samples from the old policy: KL(old || new)
    got = health(a, b, 0.2)
    assert got["kl_k3"] == pytest.approx(((-d).exp() - 1 + d).mean().item(), rel=1e-3)
    assert got["clip_fraction"] == pytest.approx((((ratio > 1.2) & (A > 0)) | ((ratio < 0.8) & (A < 0))).float().mean().item())
    v, r = b.values[b.valid], b.returns[b.valid]
    assert got["explained_variance"] == pytest.approx(1 - ((r - v).var() / r.var()).item(), rel=1e-3)


def test_the_first_loss_is_zero_and_its_gradient_is_not():
    "On its own data a policy has ratio 1, and whitened advantages have mean 0."
    a = agent()
    rollout, _ = Collector(make_envs("CartPole-v1", 4), 0).collect(lambda o: a.act(o, torch.Generator().manual_seed(0)), 32)
    b = make_batch(a, rollout, 0.98, 0.95)
    loss, parts, grad = loss_and_grad(a, b, replace(SMALL, value_coef=0.0))
    assert abs(parts["policy_loss"]) < 1e-6 and grad.norm() > 1e-3
    assert health(a, b, 0.2)["kl_k3"] < 1e-9 and health(a, b, 0.2)["clip_fraction"] == 0


# the batch

@settings(max_examples=8)
@given(seed=st.integers(0, 10000), gamma=st.sampled_from([0.9, 1.0]), lam=st.sampled_from([0.0, 0.7, 1.0]))
def test_advantages_equal_the_sums_over_each_episode(seed, gamma, lam):
    "From the definition, episode by episode, with terminations, truncations, seams and the end of the data."
    envs = gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point", max_episode_steps=17)
    a = agent(1)
    g = torch.Generator().manual_seed(seed)
    r, _ = Collector(envs, seed).collect(lambda o: a.act(o, g), 50)
    assert r.truncated.any() or r.terminated.any()
    b = make_batch(a, r, gamma, lam)
    A, R = b.advantages.view(50, 3), b.returns.view(50, 3)
    V = lambda o: a.value(o).item()
    for n in range(3):
        for t in range(50):
            if not r.valid[t, n]: continue
            total, weight, k = 0.0, 1.0, t
            while True:
                future = 0.0 if r.terminated[k, n] else V(r.next_obs[k, n])
                total += weight * (r.rewards[k, n].item() + gamma * future - V(r.obs[k, n]))
                weight *= gamma * lam; k += 1
                if k == 50 or r.done[k - 1, n]: break
            assert A[t, n].item() == pytest.approx(total, abs=1e-3) and R[t, n].item() == pytest.approx(total + V(r.obs[t, n]), abs=1e-3)
    for name in ("obs", "actions", "logp", "valid"): assert torch.equal(getattr(b, name), getattr(r, name).flatten(0, 1))
    rows = torch.tensor([3, 77, 3])
    assert torch.equal(b[rows].advantages, b.advantages[rows]) and torch.equal(b[rows].obs, b.obs[rows])
    assert not b.advantages.requires_grad and not b.values.requires_grad


# the agent

def test_networks_are_orthogonal_apart_and_begin_undecided():
    a = agent()
    for net, gain in ((a.policy, 0.01), (a.critic, 1.0)):
        for layer, g in zip(net[::2], (2 ** 0.5, 2 ** 0.5, gain)):
            w = layer.weight if layer.weight.shape[0] <= layer.weight.shape[1] else layer.weight.T
            torch.testing.assert_close(w @ w.T, g ** 2 * torch.eye(len(w)), atol=1e-5, rtol=1e-4)
            assert (layer.bias == 0).all()
    obs = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    assert (a.policy(obs).softmax(-1) - 0.5).abs().max() < 0.02
    a.value(obs).sum().backward()
    assert all(p.grad is None for p in a.policy.parameters()) and all(p.grad is not None for p in a.critic.parameters())
    assert all(torch.equal(x, y) for x, y in zip(agent(5).parameters(), agent(5).parameters())) and not torch.equal(agent(5).policy[0].weight, agent(6).policy[0].weight)


def test_actions_are_drawn_from_the_policy():
    a = agent()
    with torch.no_grad(): a.policy[-1].bias.copy_(torch.tensor([0.0, 1.0]))
    obs = torch.zeros(20000, 4)
    actions, logp = a.act(obs, torch.Generator().manual_seed(0))
    p = torch.tensor([0.0, 1.0]).softmax(-1)
    assert abs(actions.float().mean() - p[1]) < 0.015 and actions.dtype == torch.int64
    torch.testing.assert_close(logp, p.log()[actions])
    torch.testing.assert_close(a.logp_entropy(obs, actions)[0].detach(), logp)
    assert (a.greedy(obs) == 1).all() and not logp.requires_grad
    assert torch.equal(actions, a.act(obs, torch.Generator().manual_seed(0))[0])


# evaluation

def test_evaluation_plays_each_episode_whole_and_once():
    def choose(obs): return (obs[:, 2] + obs[:, 3] > 0).long()
    returns = evaluate(choose, seed=5, episodes=40)
    envs = make_envs("CartPole-v1", 40)
    envs.reset(seed=5)
    expected = []
    for state in envs.state.T:
        single, total, over = gym.make("CartPole-v1"), 0.0, False
        single.reset(); single.unwrapped.state = tuple(state)
        while not over:
            _, reward, terminated, truncated, _ = single.step(int(choose(torch.tensor(np.array(single.unwrapped.state, np.float32))[None])))
            total += reward; over = terminated or truncated
        expected.append(total)
    assert returns.tolist() == expected and len(set(expected)) > 3
    assert len(evaluate(choose, seed=5)) == 100
    assert evaluate(lambda o: torch.zeros(len(o), dtype=torch.long), seed=0).max() < 12


def test_seeds_are_apart():
    assert seeds(3) == seeds(3) and len(set(seeds(0) + seeds(1) + seeds(2))) == 12


def test_nothing_is_evaluated_on_what_it_was_trained_on(monkeypatch):
    trained, seen = [], []
    collector, original = cartpole.Collector, cartpole.evaluate
    monkeypatch.setattr(cartpole, "Collector", lambda envs, seed: (trained.append(seed), collector(envs, seed))[1])
    monkeypatch.setattr(cartpole, "evaluate", lambda choose, seed: (seen.append(seed), original(choose, seed))[1])
    got = cartpole.scores(PPO(SMALL))
    assert seen == seeds(3)[2:] and trained == seeds(3)[:1] and not set(seen) & set(trained)
    assert got["eval_episodes"] == 100 and got["solved"] is False and 5 < got["eval_return_mean"] < 475


# the loop

def iterate_all(config):
    p = PPO(config)
    return p, [p.iterate() for _ in range(config.iterations)]


def test_an_iteration_sees_each_row_once_in_each_pass(monkeypatch):
    seen, original = [], cartpole.ppo_loss
    monkeypatch.setattr(cartpole, "ppo_loss", lambda a, b, c: (seen.append(b), original(a, b, c))[1])
    batches, make = [], cartpole.make_batch
    monkeypatch.setattr(cartpole, "make_batch", lambda *args: batches.append(make(*args)) or batches[-1])
    PPO(SMALL).iterate()
    assert len(seen) == SMALL.epochs * SMALL.minibatches
    key = lambda b: sorted(map(tuple, torch.cat([b.obs, b.logp[:, None]], 1).tolist()))
    join = lambda bs: Batch(*(torch.cat([getattr(b, f) for b in bs]) for f in ("obs", "actions", "logp", "values", "advantages", "returns", "valid")))
    for epoch in range(SMALL.epochs): assert key(join(seen[epoch * 4:epoch * 4 + 4])) == key(batches[0])
    assert not torch.equal(seen[0].obs, seen[4].obs)


def test_gradients_are_shortened_and_the_learning_rate_falls(monkeypatch):
    norms, rates = [], []
    p = PPO(replace(SMALL, max_grad_norm=0.25))
    original = p.optimizer.step
    def step(*args):
        norms.append(torch.cat([q.grad.flatten() for q in p.agent.parameters()]).norm().item()); rates.append(p.optimizer.param_groups[0]["lr"])
        return original(*args)
    monkeypatch.setattr(p.optimizer, "step", step)
    rows = [p.iterate() for _ in range(8)]
    assert max(norms) <= 0.2501 and rows[0]["grad_norm"] > 0.25
    assert [r["learning_rate"] for r in rows] == pytest.approx([2e-3 * (1 - i / 8) for i in range(8)]) and rates[::8] == pytest.approx([r["learning_rate"] for r in rows])
    assert p.optimizer.defaults["eps"] == 1e-5


def test_the_rows_count_what_happened():
    p = PPO(SMALL)
    episodes = []
    collect = p.collector.collect
    def spy(*args):
        r, e = collect(*args); episodes.extend(e); return r, e
    p.collector.collect = spy
    for i in range(8):
        row = p.iterate()
        assert (row["iteration"], row["steps"], row["episodes"]) == (i + 1, (i + 1) * 128, len(episodes))
        if episodes: assert row["return_mean"] == pytest.approx(np.mean([r for r, _ in episodes[-20:]])) and row["length_mean"] == pytest.approx(np.mean([l for _, l in episodes[-20:]]))
        else: assert row["return_mean"] is None
    assert len(episodes) > 20


def test_same_seed_same_run_and_a_saved_one_goes_on():
    _, a = iterate_all(SMALL)
    _, b = iterate_all(SMALL)
    _, other = iterate_all(replace(SMALL, seed=4))
    assert a == b != other
    p = PPO(SMALL)
    rows = [p.iterate() for _ in range(3)]
    q = PPO(SMALL); q.load_state_dict(p.state_dict())
    assert rows + [q.iterate() for _ in range(5)] == a


def test_training_leaves_the_global_generators_alone():
    torch.manual_seed(0); np.random.seed(0)
    expected = torch.rand(3), np.random.rand(3)
    torch.manual_seed(0); np.random.seed(0)
    p = PPO(SMALL)
    torch.manual_seed(0)                                        # torch initialises layers before we do
    p.iterate()
    assert torch.equal(torch.rand(3), expected[0]) and (np.random.rand(3) == expected[1]).all()


# the run

def test_metrics_are_the_same_bytes_straight_or_interrupted_anywhere(tmp_path, monkeypatch):
    straight = Run.create(tmp_path / "straight", {"task": "cartpole"})
    _, rows, _ = train(SMALL, straight)
    expected = (straight.path / "metrics.csv").read_bytes()
    assert len(expected.splitlines()) == 9 and len(rows) == 8
    for stop_at in (0, 1, 5):
        run, iterate = Run.create(tmp_path / f"stop{stop_at}", {"task": "cartpole"}), PPO.iterate
        def interrupted(self):
            row = iterate(self)
            if self.iteration == max(stop_at, 1): signal.raise_signal(signal.SIGINT)
            return row
        with monkeypatch.context() as m:
            if stop_at == 0: m.setattr(cartpole, "PPO", lambda config: (signal.raise_signal(signal.SIGINT), PPO(config))[1])
            else: m.setattr(PPO, "iterate", interrupted)
            _, _, summary = train(SMALL, run)
        assert summary["interrupted"] and summary["solved"] is False and summary["eval_return_mean"] is None and summary["steps"] == stop_at * 128
        assert json.loads((run.path / "summary.json").read_text()) == summary
        assert {"checkpoint.pt", "curve.svg", "config.json"} <= {p.name for p in run.path.iterdir()}
        _, rows, summary = train(SMALL, Run.resume(run.path))
        assert (run.path / "metrics.csv").read_bytes() == expected and len(rows) == 8 and summary["steps"] == 1024 and not summary["interrupted"]


def test_killed_between_two_checkpoints_it_continues_from_the_last(tmp_path, monkeypatch):
    straight = Run.create(tmp_path / "straight", {"task": "cartpole"})
    train(SMALL, straight)
    run, iterate = Run.create(tmp_path / "killed", {"task": "cartpole"}), PPO.iterate
    def dies(self):
        if self.iteration == 5: raise MemoryError
        monkeypatch.setattr(cartpole, "CHECKPOINT_EVERY", 0.0 if self.iteration == 2 else 1e9)
        return iterate(self)
    with monkeypatch.context() as m:
        m.setattr(PPO, "iterate", dies)
        with pytest.raises(MemoryError): train(SMALL, run)
    assert Run.resume(run.path).checkpoint["ppo"]["iteration"] == 3 and len((run.path / "metrics.csv").read_text().splitlines()) == 6
    train(SMALL, Run.resume(run.path))
    assert (run.path / "metrics.csv").read_bytes() == (straight.path / "metrics.csv").read_bytes()


def test_the_summary_says_what_was_promised(tmp_path, monkeypatch):
    monkeypatch.setattr(cartpole, "SOLVED", 24); monkeypatch.setattr(cartpole, "RECENT", 10)
    run = Run.create(tmp_path / "run", {"task": "cartpole"})
    _, rows, s = train(SMALL, run)
    assert {"task", "algo", "seed", "device", "steps", "wall_seconds", "eval_return_mean", "eval_return_std", "eval_episodes", "solved", "steps_to_solve", "seconds_to_solve", "interrupted",
            "eval_sampled_return_mean", "eval_sampled_return_std"} == set(s)
    assert json.loads((run.path / "summary.json").read_text()) == s and (s["task"], s["algo"], s["seed"], s["device"], s["steps"], s["eval_episodes"]) == ("cartpole", "ppo", 3, "cpu", 1024, 100)
    first = next((r["steps"] for r in rows if r["episodes"] >= 10 and r["return_mean"] >= 24), None)
    assert s["steps_to_solve"] == first and first is not None and 0 < s["seconds_to_solve"] <= s["wall_seconds"]
    assert s["solved"] == (s["eval_return_mean"] >= 24) and isinstance(s["solved"], bool)
    monkeypatch.setattr(cartpole, "SOLVED", 475)
    _, _, s = train(SMALL)
    assert s["steps_to_solve"] is None and s["seconds_to_solve"] is None and s["solved"] is False


def test_nothing_is_learned_without_the_surrogate(monkeypatch):
    "The same budget, with the formula and with zero in its place."
    config = PPOConfig(seed=0, steps=10240)
    monkeypatch.setattr(cartpole, "health", lambda *args: dict(kl_k3=0.0, clip_fraction=0.0, explained_variance=0.0))
    learned, _ = iterate_all(config)
    with monkeypatch.context() as m:
        m.setattr(cartpole, "clipped_surrogate", lambda ratio, A, clip: ratio * 0)
        idle, _ = iterate_all(replace(config, steps=2560, entropy_coef=0.0))
    assert torch.equal(idle.agent.policy[0].weight, agent_of(config).policy[0].weight)
    assert evaluate(learned.agent.greedy, seed=1).mean() > 100 and evaluate(lambda o: idle.agent.act(o, torch.Generator().manual_seed(0))[0], seed=1).mean() < 40


def agent_of(config): return PPO(config).agent


def test_drawings(tmp_path):
    _, rows, summary = train(replace(SMALL, steps=128))
    for rows, summary in ((rows, summary), ([], summary | dict(interrupted=True, eval_return_mean=None))):
        figure = Figure()
        cartpole.plot_run(figure, rows, summary)
        assert len(figure.axes) == 4 and ("interrupted" in figure.axes[3].get_xlabel()) == summary["interrupted"]
        figure.savefig(tmp_path / "f.svg")
    ax = Figure().subplots()
    cartpole.draw_cartpole(ax, [1.0, 0.0, math.pi / 6, 0.0])
    pole = ax.lines[-1]
    assert pole.get_xdata()[1] - pole.get_xdata()[0] == pytest.approx(0.5) and pole.get_ydata()[1] - pole.get_ydata()[0] == pytest.approx(math.cos(math.pi / 6))


def test_too_few_episodes_solve_nothing(monkeypatch):
    "With a threshold that the first episode passes, `steps_to_solve` still waits until RECENT episodes have ended."
    monkeypatch.setattr(cartpole, "SOLVED", 1)
    _, rows, s = train(SMALL)
    waited = [r["steps"] for r in rows if r["episodes"] >= cartpole.RECENT]
    assert rows[0]["episodes"] < cartpole.RECENT and s["steps_to_solve"] == waited[0] > rows[0]["steps"]
