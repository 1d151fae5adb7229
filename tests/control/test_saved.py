import re
import signal
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from rlhf_notes.control import trainer as control
from rlhf_notes.control.config import PPOConfig
from rlhf_notes.control.policy import Body
from rlhf_notes.control.saved import check_kept
from rlhf_notes.control.trainer import PPO

SHAPE = dict(seed=3, steps=8 * 128, num_envs=4, num_steps=32, epochs=2)
SMALL = PPOConfig(**SHAPE)
TINY = dict(num_envs=4, num_steps=32, steps=256, minibatches=4)
STILL = TINY | dict(steps=512)


def changed(path, change):
    "A copy of a saved file after `change`."
    saved = torch.load(path, weights_only=True)
    change(saved)
    torch.save(saved, other := path.with_name("changed.pt"))
    return other


def test_a_file_is_loaded_without_an_environment_and_without_what_it_names(tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    p, obs = PPO("Pendulum-v1", **SHAPE), np.ones((3, 3))
    p.save(path := tmp_path / "ppo.pt")
    monkeypatch.setattr(control, "make_envs", lambda *args: 1 / 0)
    assert np.array_equal(PPO.load(path).predict(obs), p.predict(obs))
    assert PPO.load(path).predict(obs, deterministic=False).shape == (3, 1)
    for name in "evil:Pendulum-v1", "lambda":
        own = PPO.load(changed(path, lambda saved: saved["config"].update(env=name)))
        assert np.array_equal(own.predict(obs), p.predict(obs)) and own.config.env == name
    monkeypatch.undo()
    for call in own.evaluate, own.learn, own.scores, lambda: own.film(tmp_path / "x.gif"):
        with pytest.raises(TypeError, match="env must be a name, .* got None: give it to PPO.load"):
            call()
    assert not (tmp_path / "ran").exists() and len(own.evaluate(2, envs="Pendulum-v1")) == 2
    again = PPO.load(path)
    assert len(again.evaluate(2)) == 2 and again.iterate()["iteration"] == 1


@pytest.mark.parametrize("env", ["CartPole-v1", "MountainCarContinuous-v0"])
def test_spaces_come_back_from_a_file(tmp_path, env):
    p = PPO(env, **TINY)
    p.save(tmp_path / "ppo.pt")
    assert PPO.load(tmp_path / "ppo.pt").spaces == p.spaces


def test_a_file_of_another_version_is_refused(tmp_path):
    PPO(**TINY).save(path := tmp_path / "ppo.pt")
    torch.save({"config": {}, "state": {}}, tmp_path / "earlier")
    with pytest.raises(ValueError, match="^path must be a file that PPO.save has written, got"):
        PPO.load(tmp_path / "earlier")
    newer = changed(path, lambda saved: saved["config"].update(new_option=1))
    with pytest.raises(ValueError, match=f"got {newer} of another .*with the option new_option$"):
        PPO.load(newer)
    older = changed(path, lambda saved: saved["state"].pop("clock"))
    with pytest.raises(ValueError, match=f"got {older}: .* of another version, without clock$"):
        PPO.load(older)
    with pytest.raises(ValueError, match="^sed must be an option of PPOConfig: did you mean seed"):
        PPO.load(path, sed=1)


def places(x, place=()):
    "The keys to each entry of nested dicts and lists."
    for key in x if isinstance(x, dict) else range(len(x)) if isinstance(x, list) else ():
        yield (*place, key)
        yield from places(x[key], (*place, key))


def test_whatever_stands_in_a_file_is_told_in_one_sentence_or_read(tmp_path):
    PPO(**TINY, eval_every=128, keep_best=True, normalize_obs=True).save(path := tmp_path / "p.pt")
    for place in [*places(torch.load(path, weights_only=True))]:
        for other in None, [1], torch.zeros(2, 0):
            def spoil(saved):
                for key in place[:-1]: saved = saved[key]
                saved[place[-1]] = other
            file = changed(path, spoil)
            try:
                PPO.load(file)
            except ValueError as e:
                assert " must " in str(e).partition(file.name)[0], (place, other, e)


class Anything(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    def __init__(self, **anything): pass
    def reset(self, *, seed=None, options=None): return np.zeros(2, np.float32), {}
    def step(self, action): return np.zeros(2, np.float32), 1.0, False, False, {}


@pytest.mark.parametrize("bad", [np.ones(2), np.float32(1), np.float64(1), Path("x"),
                                 signal.SIGINT, max, np.float32, lambda: 0])
def test_arguments_that_no_file_can_keep_are_refused(bad):
    with pytest.raises(ValueError, match="^env_kwargs must hold .*, got bad=\\["):
        check_kept(dict(good=1, bad=[bad]))


def test_what_is_refused_writes_nothing(tmp_path):
    with pytest.raises(ValueError, match="^env_kwargs must hold .*, got bad=\\["):
        PPO(Anything, env_kwargs=dict(bad=[max]), **TINY).save(tmp_path / "ppo.pt")
    assert not list(tmp_path.iterdir())


def test_arguments_that_a_file_can_keep_come_back(tmp_path, monkeypatch):
    spec = gym.envs.registration.EnvSpec("Anything-v0", Anything)
    monkeypatch.setitem(gym.registry, "Anything-v0", spec)
    kwargs = dict(a=(1, 2.5), b={"c": [None, True]}, d="e")
    PPO("Anything-v0", env_kwargs=kwargs, **TINY).save(tmp_path / "ppo.pt")
    again = PPO.load(tmp_path / "ppo.pt")
    assert again.config.env_kwargs == kwargs and again.iterate()["steps"] == 128


def test_load_may_change_options_and_refuses_other_files(tmp_path):
    saved = PPO(**vars(SMALL))
    saved.save(tmp_path / "ppo.pt")
    assert PPO.load(tmp_path / "ppo.pt", epochs=1).config == replace(SMALL, epochs=1)
    torch.save({"agent": 1}, tmp_path / "other.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    (tmp_path / "hi.pt").write_text("hi")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "ppo.pt").read_bytes()[:2000])
    (tmp_path / "empty.pt").touch()
    damaged = bytearray((tmp_path / "ppo.pt").read_bytes())
    weights = next(saved.agent.parameters()).detach().numpy().tobytes()
    damaged[damaged.index(weights) + 3] ^= 64  # the exponent of the first
    (tmp_path / "damaged.pt").write_bytes(damaged)
    with pytest.raises(FileNotFoundError): PPO.load(tmp_path / "nowhere.pt")
    for name in ("other", "text", "hi", "cut", "empty", "damaged"):
        with pytest.raises(
            ValueError, match=f"path must be a file that PPO.save has written, got .*{name}.pt"):
            PPO.load(tmp_path / f"{name}.pt")
    with pytest.raises(ValueError, match="damaged.pt: damaged.pt is damaged, in "):
        PPO.load(tmp_path / "damaged.pt")
    for options, words in ((dict(hidden=32), r"ppo.pt: policy.0.weight must have shape \(32, 4\)"),
                           (dict(env="Pendulum-v1"), "env must have the observations that")):
        with pytest.raises(ValueError, match=words):
            PPO.load(tmp_path / "ppo.pt", **options)


# code that no file holds

def test_a_network_of_ones_own_is_copied_learned_saved_and_given_again(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Dropout())
    before = net[0].weight.detach().clone()
    p = PPO(network=net, **STILL).learn()
    copies = [x[0].nets[0][0][0].weight for x in (p.agent.policy, p.agent.critic)]
    assert torch.equal(net[0].weight, before)
    assert not any(torch.equal(x, before) for x in copies) and not torch.equal(*copies)
    p.save(tmp_path / "p.pt")
    obs = np.random.default_rng(0).normal(size=(50, 4))
    again = PPO.load(tmp_path / "p.pt", network=net)
    values = [x.agent.value(torch.tensor(obs).float()) for x in (p, p, again)]
    assert torch.equal(values[0], values[1]) and torch.equal(values[1], values[2]) and net.training
    assert np.array_equal(again.predict(obs), p.predict(obs))
    with pytest.raises(ValueError, match="^network must be given to load again: .*, no code$"):
        PPO.load(tmp_path / "p.pt")


@pytest.mark.parametrize("network, words", [
    (torch.nn.Linear(5, 8), "Linear: mat1"), (torch.nn.Linear(4, 8).double(), "Linear: .* dtype"),
    (torch.nn.BatchNorm1d(4, track_running_stats=False), "BatchNorm1d: Expected more than 1 value"),
    (torch.nn.LSTM(4, 8), "LSTM: .* got tuple"), (torch.nn.Flatten(0), "Flatten: "),
    (torch.nn.Unflatten(1, (2, 2)), r"Unflatten: it returns torch.float32 of shape \(1, 2, 2\)")])
def test_a_network_of_ones_own_is_tried_once(network, words):
    wanted = r"^network must take float32 of shape \(n, 4\) and return one float32 tensor"
    with pytest.raises(ValueError, match=f"{wanted} .* got {words}"): PPO(network=network)
    with pytest.raises(ValueError, match=r"shape \(n, 1, 6, 6\) "):
        Body(gym.spaces.Box(0, 255, (6, 6), np.uint8), network=network)


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated")
def test_a_network_that_cannot_be_copied_is_refused_by_name():
    network = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 8)), nn.Tanh())
    network(torch.zeros(1, 4))  # its weight is the result of a computation now
    with pytest.raises(ValueError, match="^network must be a module that copy.deepcopy copies"):
        PPO(network=network)
    PPO(network=nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)), steps=1024).close()


@pytest.mark.parametrize("options, words", [
    (dict(network=5), "network must be widths of hidden layers, an activation or a module, got 5"),
    (dict(network=(0,)), "network must be widths"), (dict(network="elu"), "activation must be"),
    (dict(clip=lambda left: -1), "clip must be a function to numbers > 0, got -1"),
    (dict(learning_rate=lambda left: None), "learning_rate must be a function to numbers > 0")])
def test_networks_and_schedules_that_are_none(options, words):
    with pytest.raises(ValueError, match=words): PPO(**options)


def test_schedules_are_functions_of_what_is_left(tmp_path):
    asked = []
    def rate(left):
        asked.append(left)
        return 1e-3 * left ** 3
    p = PPO(learning_rate=rate, clip=lambda left: 0.1 + left / 2, **STILL).learn()
    assert [r["learning_rate"] for r in p.rows] == [1e-3 * x ** 3 for x in (1, 0.75, 0.5, 0.25)]
    assert p.optimizer.steps == 64 and min(asked) == 0.25
    p.iteration = 2
    assert p.anneal("clip") == pytest.approx(0.35)
    p.save(tmp_path / "p.pt")
    with pytest.warns(UserWarning, match="learning_rate was a function"):
        assert PPO.load(tmp_path / "p.pt").config.learning_rate == 1e-3
    assert PPO.load(tmp_path / "p.pt", learning_rate=rate, clip=0.1).anneal("clip") == 0.1
