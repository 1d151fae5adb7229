import os
import random
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import PendulumEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from rlhf_notes.control.envs import (
    autoreset_mode,
    env_name,
    find_spec,
    identify,
    make_envs,
    threshold,
)

class Still(gym.Env):
    "Nothing happens."
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)


def test_a_module_makes_its_environments_known(tmp_path, monkeypatch):
    (tmp_path / "makes_itself_known.py").write_text(
        "import gymnasium as gym\ngym.register('rlhf_notes/Known-v0', "
        "'gymnasium.envs.classic_control:PendulumEnv', reward_threshold=7, " "max_episode_steps=9)")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert find_spec("makes_itself_known:rlhf_notes/Known-v0").reward_threshold == 7
        sys.modules.pop("makes_itself_known")
        gym.registry.pop("rlhf_notes/Known-v0")
        assert make_envs("makes_itself_known:rlhf_notes/Known-v0", 2).num_envs == 2
    finally: gym.registry.pop("rlhf_notes/Known-v0", None)
    assert find_spec("CartPole-v1") is gym.spec("CartPole-v1")


@pytest.mark.parametrize("error, words", [(RuntimeError("no licence"), "no licence"),
                                          (ImportError("libfoo.so"), "libfoo.so"),
                                          (AssertionError(), "AssertionError"),
                                          (None, "size")])
def test_an_environment_that_cannot_be_made_is_named(monkeypatch, error, words):
    class Fails(gym.Env):
        def __init__(self, *size):
            if error is not None: raise error
    class Needs(gym.Env):
        def __init__(self, size): pass
    monkeypatch.setitem(
        gym.registry, "Fails-v0",
        gym.envs.registration.EnvSpec("Fails-v0", Needs if error is None else Fails))
    with pytest.raises(
        ValueError,
        match=f"env must be an environment that Gymnasium can make, got 'Fails-v0': .*{words}"):
        make_envs("Fails-v0", 1)


def test_make_envs():
    assert type(make_envs("CartPole-v1", 3).unwrapped).__name__ == "CartPoleVectorEnv"
    assert make_envs("CartPole-v1", 3).num_envs == 3
    assert isinstance(make_envs("Acrobot-v1", 2), SyncVectorEnv)
    assert isinstance(make_envs("CartPole-v1", 2, "sync"), SyncVectorEnv)
    envs = make_envs("CartPole-v1", 2, "async")
    assert isinstance(envs, AsyncVectorEnv)
    envs.close()


def test_observations_are_handed_out_without_a_copy():
    for way in ("sync", "async"):
        envs = make_envs("Pendulum-v1", 2, way)
        first, _ = envs.reset(seed=0)
        kept = first.copy()
        second, *_ = envs.step(np.ones((2, 1), np.float32))
        assert np.shares_memory(first, second) and (first != kept).any()
        envs.close()


def test_autoreset_mode():
    assert autoreset_mode(make_envs("CartPole-v1", 2)) == autoreset_mode(
        SyncVectorEnv([Still])) == "NextStep"
    assert autoreset_mode(
        SyncVectorEnv([Still], autoreset_mode=AutoresetMode.SAME_STEP)) == "SameStep"


@pytest.mark.parametrize("call, words", [
    (lambda: make_envs("CartPool-v1", 2),
     "env must be an environment that Gymnasium can make, got 'CartPool-v1'"),
    *((lambda env=env: find_spec(env),
       f"^env must be an environment that Gymnasium can make, got '{env}': .")
      for env in ("CartPool-v1", "no_such_module:CartPole-v1")),
    (lambda: make_envs("CartPole", 2),
     r"got 'CartPole': No registered env with id: CartPole \(one of your own, .* "
     r"is module:Name-v0\)$"),
    (lambda: make_envs("no_such_module:CartPole-v1", 2),
     "env must be an environment that Gymnasium can make"),
    (lambda: make_envs("Blackjack-v1", 2),
     "env must have observations of Box, .*, or a Dict of these, got "
     "'Blackjack-v1' with Tuple.* \\(gymnasium.wrappers.FlattenObservation " "makes them\\)$"),
    (lambda: make_envs("CartPole-v1", 2, "threads"),
     "vectorization must be one of 'auto', 'sync', 'async', got 'threads'"),
    (lambda: make_envs("CartPole-v1", 0), "num_envs must be .* got 0"),
])
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words): call()


def test_a_wrapper_makes_numbers_of_any_observation():
    make = lambda **options: gym.wrappers.FlattenObservation(gym.make("Blackjack-v1", **options))
    envs = make_envs(make, 2)
    assert envs.reset(seed=0)[0].shape == (2, 32 + 11 + 2)


def test_an_observation_has_a_number(monkeypatch):
    class Blind(Still): observation_space = gym.spaces.Box(-1, 1, (0,))
    monkeypatch.setitem(gym.registry, "Blind-v0", gym.envs.registration.EnvSpec("Blind-v0", Blind))
    with pytest.raises(
        ValueError,
        match="env must have observations of Box, .* got 'Blind-v0' with Box"):
        make_envs("Blind-v0", 1)


def test_thresholds(monkeypatch):
    assert (threshold("CartPole-v1"), threshold("Pendulum-v1"), threshold("Acrobot-v1"),
            threshold("gymnasium:Pendulum-v1")) == (475, -200, -100, -200)
    monkeypatch.setitem(gym.registry, "Still-v0", gym.envs.registration.EnvSpec("Still-v0", Still))
    assert threshold("Still-v0") is None
    with pytest.raises(
        ValueError, match="^env must be an environment that Gymnasium can make, got 'Nope-v0': "):
        threshold("Nope-v0")


class Guessed(Still):
    "The first state is drawn from the space."
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}
    def step(self, action):
        return self.observation_space.sample(), float(self.action_space.sample()), False, False, {}


def test_the_seed_is_that_of_the_spaces_too(monkeypatch):
    monkeypatch.setitem(
        gym.registry, "Guessed-v0", gym.envs.registration.EnvSpec("Guessed-v0", Guessed))
    def played(seed):
        envs = make_envs("Guessed-v0", 1)
        return [envs.reset(seed=seed)[0].tolist(),
                *(x.tolist() for _ in range(9) for x in envs.step(np.zeros(1, int))[:2])]
    assert played(3) == played(3) != played(4)


def test_an_environment_of_ones_own_needs_no_name():
    """A function that makes it, its class, or the environment itself, with its limits; of one alone
    no copy is needed.
    """
    made = gym.make("Pendulum-v1", g=5.0)
    for env, kwargs in (
        (made, {}), (lambda: gym.make("Pendulum-v1", g=5.0), {}), (PendulumEnv, {"g": 5.0})):
        envs = make_envs(env, 3, env_kwargs=kwargs)
        assert [e.unwrapped.g for e in envs.envs] == [5, 5, 5]
        assert all(e.unwrapped is not made.unwrapped for e in envs.envs)
        assert envs.reset(seed=0)[0].std(0).min() > 0
    assert make_envs(made, 1).envs[0].unwrapped is made.unwrapped and len(made.unwrapped.state) == 2
    balance = gym.make("CartPole-v1")
    assert (threshold(balance), find_spec(balance).id) == (475, "CartPole-v1")
    assert isinstance(make_envs(balance, 2), SyncVectorEnv)
    assert make_envs(balance, 2).spec.max_episode_steps == 500
    assert threshold(made) == -200 and threshold(PendulumEnv()) is None
    assert [env_name(env) for env in ("A-v0", made, PendulumEnv, lambda: made)] == [
        "A-v0", "PendulumEnv", "PendulumEnv", "lambda"]
    envs = make_envs(made, 2, "async")
    assert isinstance(envs, AsyncVectorEnv) and envs.get_attr("g") == (5, 5)
    envs.close()


class Alone(Guessed):
    "Cannot be copied."
    def __deepcopy__(self, memo): raise TypeError("a licence for one")


def test_an_environment_that_is_the_only_one():
    one = Alone()
    assert make_envs(one, 1).envs[0].unwrapped is one
    with pytest.raises(
        ValueError,
        match=r"env must be an environment that Gymnasium can make, got .*Alone.*: it "
        r"cannot be copied, so num_envs must be 1 \(a licence for one\)"):
        make_envs(one, 2)
    with pytest.raises(
        ValueError, match="env must make a new environment at each call, got .*lambda"):
        make_envs(lambda: one, 2)
    with pytest.raises(
        ValueError,
        match="env must be an environment that Gymnasium can make, got .*Alone.*: .*'g'"):
        make_envs(Alone(), 1, env_kwargs={"g": 5.0})


def test_an_environment_with_arguments():
    assert [env.unwrapped.g
            for env in make_envs("Pendulum-v1", 2, env_kwargs={"g": 5.0}).envs] == [5, 5]
    with pytest.raises(
        ValueError,
        match="env must be an environment that Gymnasium can make, got 'Pendulum-v1': .*'gg'"):
        make_envs("Pendulum-v1", 2, env_kwargs={"gg": 5.0})


@pytest.mark.parametrize(
    "name, wrong", [("reset", lambda self, *, seed=None, options=None: np.zeros(2)),
                    ("reset", lambda self, seed=None: (np.zeros(2), {})),
                    ("step", lambda self, a: (np.zeros(2), 0.0, False, {})),
                    ("step", lambda self, a: (np.zeros(2), np.zeros((1, 1)), False, False, {})),
                    ("step", lambda self, a: (np.zeros(3), 0.0, False, False, {}))],
    ids=["no info", "no options", "old step", "reward of shape (1, 1)", "shape"])
def test_an_environment_with_another_api_is_named(monkeypatch, name, wrong, request):
    if "reward" in request.node.name and np.lib.NumpyVersion(np.__version__) < "2.4.0":
        pytest.skip("an older NumPy takes an array of one number for a number")
    kind = type("Odd", (Guessed,), {name: wrong})
    monkeypatch.setitem(gym.registry, "Odd-v0",
                        gym.envs.registration.EnvSpec("Odd-v0", kind, disable_env_checker=True,
                                                      order_enforce=False))
    with pytest.raises(ValueError,
                       match="^env must be an environment whose reset and step are as Gymnasium's "
                       "API has them, with observations of shape \\(2,\\), got 'Odd-v0': ."):
        make_envs("Odd-v0", 2)


@pytest.mark.parametrize("env", [None, 3, b"CartPole-v1"])
def test_what_is_no_environment_is_told(env):
    with pytest.raises(
        TypeError, match="^env must be a name, an environment or a function that makes one, got "):
        make_envs(env, 2)


@pytest.mark.parametrize("what, bad", [
    ("reset", np.nan), ("reset", np.inf), ("observation", np.nan), ("observation", np.inf),
    ("reward", np.nan), ("reward", np.inf), ("reward", None)])
def test_an_environment_of_nan_is_refused_before_a_training(what, bad):
    class Broken(Still):
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return np.full(2, bad if what == "reset" else 0, np.float32), {}
        def step(self, action):
            return (np.full(2, bad if what == "observation" else 0, np.float32),
                    bad if what == "reward" else 0.0, False, False, {})
    with pytest.raises(ValueError,
                       match=f"^env must be an environment whose .* its "
                       f"{what.replace('reset', 'observation')} is not a finite number$"):
        make_envs(Broken, 2)


@pytest.mark.parametrize("env, kwargs, limit", [
    ("Pendulum-v1", {}, 200), ("Pendulum-v1", {"max_episode_steps": 80}, 80),
    ("Pendulum-v1", {"max_episode_steps": -1}, None), (PendulumEnv, {}, None),
    (gym.make("Pendulum-v1"), {}, 200), (gym.make("Pendulum-v1", max_episode_steps=300), {}, 300),
    (gym.make("Pendulum-v1", max_episode_steps=-1), {}, None),
    (lambda: gym.make("Pendulum-v1", max_episode_steps=20), {}, 20)])
@pytest.mark.parametrize("way", ["sync", "async"])
def test_the_time_limit_is_that_of_the_environment(env, kwargs, limit, way):
    "Not that of the registry; and the environments end then."
    envs = make_envs(env, 2, way, kwargs)
    assert envs.spec.max_episode_steps == limit
    envs.reset(seed=0)
    ends = [envs.step(np.zeros((2, 1), np.float32))[3].all() for _ in range(310)]
    assert (ends.index(True) + 1 if True in ends else None) == limit
    envs.close()


class Drawn(Still):
    "Draws from generators that it made in its constructor, or from those of the process."
    observation_space = gym.spaces.Box(-np.inf, np.inf, (6,))
    def __init__(self):
        self.rngs = [np.random.default_rng(5), np.random.RandomState(5), random.Random(5)]
        self.deep = {"torch": torch.Generator().manual_seed(5)}
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.look(), {}
    def step(self, action): return self.look(), 0.0, False, False, {}
    def look(self):
        a, b, c = self.rngs
        d = torch.rand((), generator=self.deep["torch"]).item()
        return np.array([a.random(), b.rand(), c.random(), d, np.random.rand(),
                         torch.rand(()).item()])


@pytest.mark.parametrize("way, columns", [("sync", 4), ("async", 6)])
def test_copies_draw_numbers_of_their_own(way, columns):
    "Of a generator made in the constructor, and with processes of the global ones too."
    one = Drawn()
    def seen():
        envs = make_envs(one, 4, way)
        first, (second, *_) = envs.reset(seed=3)[0].copy(), envs.step(np.zeros(4, int))
        both = np.stack([first, second])
        envs.close()
        return both[..., :columns]
    before = np.random.get_state()[1].copy(), random.getstate(), torch.get_rng_state()
    a, b = seen(), seen()
    assert all(len(np.unique(a[:, :, k])) == 8 for k in range(columns))
    assert np.array_equal(a, b)                      # the same in each run
    if way == "async":
        assert (np.random.get_state()[1] == before[0]).all() and random.getstate() == before[1]
        assert torch.equal(torch.get_rng_state(), before[2])
    assert one.rngs[0].random() == np.random.default_rng(5).random()       # it was left alone


@pytest.mark.parametrize("way", ["sync", "async"])
def test_an_info_that_changes_its_shape_is_no_ones_business(way):
    class Path(Still):
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.t = 0
            return np.zeros(2, np.float32), {"path": 0.0}
        def step(self, action):
            self.t += 1
            return np.zeros(2, np.float32), 0.0, False, False, {"path": np.zeros(self.t)}
    envs = make_envs(Path, 3, way)
    for _ in range(4): assert envs.step(np.zeros(3, int))[-1] == {}
    envs.close()


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("error, words", [
    (KeyError("clock"), "KeyError: 'clock'"), (AssertionError(), "AssertionError$"),
    (FileNotFoundError(2, "No such file", "asset.bin"), "FileNotFoundError: .*'asset.bin'")])
def test_an_error_of_the_environment_says_whose_it_is(way, error, words):
    class Fails(Still):
        def __init__(self): self.t = 0
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return np.zeros(2, np.float32), {}
        def step(self, action):
            self.t += 1
            if self.t > 2: raise error
            return np.zeros(2, np.float32), 0.0, False, False, {}
    envs = make_envs(Fails, 2, way)
    envs.step(np.zeros(2, int))
    with pytest.raises(RuntimeError, match=f"^the environment's step raised {words}"):
        envs.step(np.zeros(2, int))
    envs.close()
    with pytest.raises(ValueError, match="got <function .*>: KeyError: 'clock'$"):
        make_envs(lambda: {}["clock"], 2)


@pytest.mark.parametrize("space, helps", [
    (gym.spaces.Dict({"a": gym.spaces.Tuple([gym.spaces.Discrete(2)])}), True),
    (gym.spaces.Sequence(gym.spaces.Discrete(2)), False), (gym.spaces.Box(-1, 1, (0,)), False),
    (gym.spaces.Graph(gym.spaces.Box(-1, 1), gym.spaces.Discrete(2)), False)])
def test_flattening_is_proposed_where_it_helps(space, helps):
    Odd = type("Odd", (Still,), {"observation_space": space, "reset": lambda self, **how: (0, {})})
    with pytest.raises(ValueError, match="env must have observations") as e: make_envs(Odd, 1)
    assert ("FlattenObservation" in str(e.value)) == helps


@pytest.mark.parametrize("bad, made", [  # a space is looked at before the others are made
    ({"observation_space": gym.spaces.Text(2)}, 1), ({"step": None}, 3),
    ({"reset": lambda self, **how: (np.zeros(2), None)}, 3),
    ({"step": lambda self, action: (np.full(2, np.nan), 0.0, False, False, {})}, 3)])
def test_environments_that_are_refused_are_closed(bad, made):
    "Each of those that were made, and once."
    closed = []
    class Closes(Guessed):
        def close(self): closed.append(self)
    with pytest.raises(ValueError, match="^env must "): make_envs(type("Bad", (Closes,), bad), 3)
    assert len(closed) == len(set(map(id, closed))) == made


@pytest.mark.parametrize("way", ["sync", "async"])
def test_an_environment_that_is_the_users_stays_open(way):
    closed = []
    class Mine(Guessed):
        def close(self): closed.append(self)
    make_envs(mine := Mine(), 1, way).close()
    assert mine not in closed


def test_a_closed_environment_is_asked_once_and_told():
    asked = []
    class Closes(Guessed):
        def reset(self, *, seed=None, options=None):
            asked.append(seed)
            raise RuntimeError("it is closed")
    env = Closes()
    env.close()
    with pytest.raises(ValueError, match="^env must .*reset raised RuntimeError: it is closed$"):
        make_envs(env, 1)
    assert len(asked) == 1


def test_a_function_is_looked_at_once_and_what_it_made_is_used():
    made = []
    def make():
        made.append(gym.make("Pendulum-v1"))
        return made[-1]
    spec, again, same_units = identify(make)
    assert same_units
    envs = make_envs(again, 3)
    assert (spec.id, len(made), env_name(again)) == ("Pendulum-v1", 3, "make")
    assert [single.unwrapped for single in envs.envs] == [env.unwrapped for env in made]
    assert identify("CartPole-v1") == (gym.spec("CartPole-v1"), "CartPole-v1", True)
    assert identify(PendulumEnv)[0].id == "PendulumEnv"
    with pytest.raises(
        ValueError, match="^env must be an environment that Gymnasium can make, got "):
        identify(lambda: None)


def test_a_reward_is_a_number():
    class Odd(Guessed):
        def step(self, action): return np.zeros(2, np.float32), np.ones(1), False, False, {}
    with pytest.raises(ValueError, match="its reward must be one number, got array"):
        make_envs(Odd, 2, "async")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_environment_cannot_end_the_program_as_if_all_were_well(mode):
    class Leaves(Guessed):
        def step(self, action): raise SystemExit(0)
    with pytest.raises(ValueError, match="the environment's step raised SystemExit: 0"):
        make_envs(Leaves, 2, mode)

    class Refuses(Guessed):
        def __init__(self): raise SystemExit(0)
    with pytest.raises(ValueError, match="got .*SystemExit: 0$"): make_envs(Refuses, 2, "sync")


@pytest.mark.skipif(not hasattr(os, "getsid"), reason="no sessions")
def test_the_signals_of_a_terminal_do_not_reach_the_processes_of_environments():
    envs = make_envs("CartPole-v1", 2, "async")
    assert [os.getsid(p.pid) for p in envs.processes] == [p.pid for p in envs.processes]
    envs.close()
    sync = os.getsid(0)
    make_envs("CartPole-v1", 2, "sync").close()
    assert os.getsid(0) == sync
