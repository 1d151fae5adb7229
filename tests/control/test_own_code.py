"What users' own environments, wrappers and options do beside the trainer."
import re
import threading
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import wrappers
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete

from rlhf_notes import PPO
from rlhf_notes.control import plots, policy
from rlhf_notes.control.envs import identify
from rlhf_notes.control.policy import distribution, picture_net
from rlhf_notes.control.trainer import episode_returns
from rlhf_notes.training.runs import Run

TINY = dict(steps=512, num_envs=4, num_steps=32, minibatches=2, network=(8,), seed=0)
VECTOR = Box(-1, 1, (2,), np.float32)


class Own(gym.Env):
    "Ten steps; the reward is the mean of the action, or `level`."
    level = None

    def __init__(self, shows=VECTOR, takes=Discrete(2), steps=10, spoils=False, reward=None):
        self.observation_space, self.action_space = shows, takes
        self.steps, self.spoils, self.reward = steps, spoils, reward

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.look(), {}

    def look(self):
        if isinstance(self.observation_space, Dict):
            return {name: np.zeros(x.shape, x.dtype) for name, x in
                    self.observation_space.spaces.items()}
        return np.full(self.observation_space.shape, self.t / 10, self.observation_space.dtype)

    def step(self, action):
        self.t += 1
        earned = float(np.mean(action)) if self.level is None else self.level
        earned = earned if self.reward is None else self.reward
        if self.spoils:
            action[...] = 0
        return self.look(), earned, False, self.t >= self.steps, {}


def told(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = call()
    return result, [str(w.message) for w in found if w.category is UserWarning]


@pytest.mark.parametrize("takes", [MultiBinary(3), MultiDiscrete([2, 3]), Box(-1, 1, (2,))],
                         ids=str)
def test_an_environment_may_write_into_its_action(takes):
    one, two = (PPO(lambda: Own(takes=takes, spoils=spoils), **TINY).learn().rows
                for spoils in (False, True))
    assert one == two


def box(low, high, size=1): return Box(low, high, (size,), np.float32)


@pytest.mark.parametrize("first, second, kind", [
    ((VECTOR, box(-1, 1)), (VECTOR, box(-2, 2)), "actions"),
    ((VECTOR, box(-1, 1)), (VECTOR, box(0, 0.4)), "actions"),
    ((VECTOR, Discrete(3)), (VECTOR, Discrete(3, start=5)), "actions"),
    ((VECTOR, MultiBinary(2)), (VECTOR, MultiDiscrete([2, 2])), "actions"),
    ((box(0, 1), Discrete(2)), (box(0, 255), Discrete(2)), "observations"),
    ((Dict(a=VECTOR, b=box(0, 1, 2)), Discrete(2)), (Dict(b=VECTOR, c=VECTOR), Discrete(2)),
     "observations")])
def test_a_file_is_loaded_with_its_own_spaces(first, second, kind, tmp_path):
    PPO(lambda: Own(*first), **TINY).save(tmp_path / "p.pt")
    again = PPO.load(tmp_path / "p.pt", env=lambda: Own(*first))
    words = f"env must have the {kind} that the policy has learned with"
    with pytest.raises(ValueError, match=words):
        PPO.load(tmp_path / "p.pt", env=lambda: Own(*second))
    with pytest.raises(ValueError, match="^envs must have the"):
        again.evaluate(2, envs=gym.vector.SyncVectorEnv([lambda: Own(*second)]))


@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize("how", [lambda e: e, lambda e: (lambda: Own(steps=40))])
def test_evaluations_leave_the_episodes_of_the_training_alone(how, num_envs):
    options = TINY | dict(num_envs=num_envs, num_steps=128 // num_envs)
    def rows(**more):
        ppo, _ = told(lambda: PPO(how(Own(steps=40)), **options, **more).learn())
        return [{k: x for k, x in r.items() if "eval" not in k} for r in ppo.rows]
    assert rows() == rows(eval_every=128, eval_episodes=2)


def test_an_evaluation_that_has_only_the_training_s_environments_says_so():
    one = Own(steps=40)
    envs = gym.vector.SyncVectorEnv([Own] * 4)
    for env, words in (lambda: one, "ends their episodes"), (envs, "give env as a function"):
        options = TINY | (dict(num_envs=1, num_steps=128) if env is not envs else {})
        ppo, _ = told(lambda: PPO(env, **options))
        assert any(words in x for x in told(lambda: ppo.evaluate(2))[1])
        assert "collector" not in vars(ppo)


@pytest.mark.parametrize("make, same", [
    (lambda: gym.make("CartPole-v1"), True),
    (lambda: wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1")), True),
    (lambda: wrappers.RescaleAction(gym.make("Pendulum-v1"), -1, 1), True),
    (lambda: gym.make_vec("CartPole-v1", 2), True),
    (lambda: wrappers.TransformReward(gym.make("CartPole-v1"), lambda r: r / 10), False),
    (lambda: wrappers.vector.TransformReward(gym.make_vec("CartPole-v1", 2), lambda r: r), False),
    (lambda: gym.make("Pendulum-v1", g=5), False),
    (lambda: gym.make("CartPole-v1", max_episode_steps=50), False)])
def test_solved_is_said_only_in_the_units_of_the_registry(make, same):
    assert identify(make())[2] is same


def test_arguments_that_change_the_task_leave_solved_open():
    for kwargs, same in ((dict(render_mode=None), True), (dict(sutton_barto_reward=True), False),
                         (dict(max_episode_steps=50), False), (None, True)):
        assert identify("CartPole-v1", kwargs)[2] is same
    ppo = PPO("CartPole-v1", env_kwargs=dict(sutton_barto_reward=True), **TINY)
    assert ppo.threshold is None and PPO("CartPole-v1", **TINY).threshold == 475


@pytest.mark.parametrize("low, high, warns", [
    ([5], [35], True), ([5, -np.inf], [35, np.inf], True), ([5], [np.inf], True),
    ([-np.inf], [-1], True), ([0.5, -1], [np.inf, 1], True), ([-np.inf], [np.inf], False),
    ([-1], [np.inf], False), ([0], [1], False), ([-1, -100], [1, 100], True),
    ([-0.08], [0.08], True), ([-0.11], [0.11], False), ([-11], [11], True), ([-9], [9], False)])
def test_bounds_far_from_0_are_told_component_by_component(low, high, warns):
    space = Box(np.float32(low), np.float32(high))
    _, said = told(lambda: distribution(space))
    assert bool(said) is warns and all("far from [-1, 1]" in x for x in said)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_moments_in_wrappers_are_told_with_the_option_that_replaces_them(vectorization):
    def make(): return wrappers.NormalizeReward(wrappers.NormalizeObservation(Own()))
    ppo, said = told(lambda: PPO(make, **TINY, vectorization=vectorization))
    ppo.close()
    assert any("normalize_obs=True" in x for x in said)
    assert any("normalize_rewards=True" in x for x in said)
    assert not told(lambda: PPO(Own, **TINY))[1]


class Scaled(wrappers.NormalizeObservation): "A class of the user's."
class Told(wrappers.RecordEpisodeStatistics): "Another."


def test_a_class_of_ones_own_counts_as_the_wrapper_that_it_derives_from():
    def make(): return wrappers.TransformReward(Told(Scaled(Own(reward=1.0))), lambda r: 0.1 * r)
    ppo, said = told(lambda: PPO(make, **TINY).learn())
    assert any("normalize_obs=True" in x for x in said) and ppo.rows[-1]["return_mean"] == 10
    assert any("has its moments there" in x for x in told(lambda: ppo.evaluate(2))[1])
    cartpole = Told(gym.make("CartPole-v1"))
    assert identify(wrappers.TransformReward(cartpole, lambda r: 0.1 * r))[2]


def test_a_name_that_normalizes_is_evaluated_with_the_moments_of_its_training(monkeypatch):
    spec = EnvSpec("Scaled-v0", entry_point=lambda: Scaled(Own()))
    monkeypatch.setitem(gym.registry, spec.id, spec)
    ppo, _ = told(lambda: PPO(spec.id, **TINY).learn())
    assert any("has its moments there" in x for x in told(lambda: ppo.evaluate(2))[1])
    ppo.close()
    assert not told(lambda: PPO("CartPole-v1", **TINY).evaluate(2))[1]


def limited(env): return wrappers.TimeLimit(env, 8)


@pytest.mark.parametrize("make, missing", [
    (lambda: limited(Told(Own(reward=1.0))), True), (lambda: Told(limited(Own(reward=1.0))), False),
    (lambda: limited(Own(reward=1.0)), False), (lambda: limited(limited(Told(Own()))), True)])
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_episodes_that_are_cut_around_their_statistics_are_told(make, missing, vectorization):
    ppo, said = told(lambda: PPO(make, **TINY, vectorization=vectorization).learn())
    ppo.close()
    assert any("put it inside" in x for x in said) is missing
    assert ppo.rows[-1]["return_mean"] == (None if missing else 8)


def test_a_mask_among_the_observations_is_told():
    flags = Box(0, 1, (1, 2), np.int8)
    for name, space in (("action_mask", MultiBinary(2)), ("Legal", flags), ("valid_moves", flags),
                        ("avail_actions", MultiDiscrete([2, 2])), ("allowed", Box(0, 1, (2,)))):
        shows = Dict({"look": VECTOR, name: space})
        said = told(lambda: PPO(lambda: Own(shows), **TINY))[1]
        assert any(f"[{name!r}]" in x and 'info["action_mask"]' in x for x in said)
    for name, space in ("masked", MultiBinary(3)), ("lights", MultiBinary(2)):
        shows = Dict({"look": VECTOR, name: space})
        assert not told(lambda: PPO(lambda: Own(shows), **TINY))[1]


def test_copies_of_an_environment_follow_set_attr():
    env = Own()
    ppo, said = told(lambda: PPO(env, **TINY))
    assert any('trainer.envs.set_attr("name", value)' in x for x in said)
    ppo.learn(256)
    ppo.envs.set_attr("level", 3.0)
    assert ppo.learn(steps=1024).rows[-1]["return_mean"] == 30
    assert not told(lambda: PPO(env, **TINY | dict(num_envs=1, num_steps=128)))[1]


def test_an_evaluation_follows_the_changes_of_the_one_environment():
    env = Own()
    env.level = 1.0
    def harder(ppo, row): env.level = 1.0 + ppo.iteration
    options = TINY | dict(num_envs=1, steps=96, eval_every=32, eval_episodes=2)
    rows = PPO(env, **options).learn(callback=harder).rows
    assert [row["eval_return_mean"] for row in rows] == [None, 20.0, 30.0]


def test_only_gymnasium_s_classes_are_drawn_by_us():
    class CartPoleEnv(gym.Env): pass  # noqa: F811
    assert plots._drawing("CartPole-v1") is plots.draw_cartpole
    assert plots._drawing(gym.make("CartPole-v1")) is plots.draw_cartpole
    assert plots._drawing(CartPoleEnv) is None and plots._drawing(CartPoleEnv()) is None
    class Mine(globals()["CartPoleEnv"]): pass
    assert plots._drawing(Mine) is plots._drawing(Mine()) is plots._drawing("Acrobot-v1") is None


@pytest.mark.parametrize("stop", [lambda t, row: False, lambda t, row: None])
def test_a_training_that_was_stopped_is_no_finished_one(stop, tmp_path):
    import json
    PPO("CartPole-v1", **TINY, eval_episodes=2, out=tmp_path / "run", track=[]).learn(callback=stop)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["interrupted"] is (stop(0, 0) is False)
    assert (summary["eval_return_mean"] is None) is summary["interrupted"]


@pytest.mark.parametrize("learn", [
    lambda ppo, run, stop: ppo.learn(callback=stop),
    lambda ppo, run, stop: ppo.learn(run=Run.create(run.with_name("other"), {"task": "train"}),
                                     callback=stop)])
def test_a_training_that_fails_closes_its_run(learn, tmp_path):
    "Else the hook of threads stays ours as long as somebody looks at the error."
    before = threading.excepthook
    def stop(trainer, row): raise RuntimeError("here")
    with pytest.raises(RuntimeError, match="^here$") as error:
        learn(PPO("CartPole-v1", **TINY, out=tmp_path / "run"), tmp_path / "run", stop)
    assert threading.excepthook is before and error.value


def test_predict_copies_no_weights_and_sees_each_change():
    ppo = PPO("CartPole-v1", **TINY)
    obs, actor = np.random.default_rng(0).normal(size=(50, 4)), ppo.policy()
    act = ppo.policy(copy=False)
    assert np.array_equal(ppo.predict(obs), actor(np.float32(obs)))
    for p in ppo.agent.policy[-1].parameters():
        p.data.mul_(-1)
    assert np.array_equal(act(np.float32(obs)), ppo.predict(obs))
    assert np.array_equal(ppo.policy()(np.float32(obs)), ppo.predict(obs))
    assert not np.array_equal(actor(np.float32(obs)), ppo.predict(obs))


def test_an_episode_without_an_end_is_told_before_it_is_given_up():
    returns, said = told(lambda: episode_returns(
        lambda obs: np.ones(len(obs), int), 0, 2, lambda: Own(steps=10**9), longest=200))
    assert returns.tolist() == [200, 200]
    assert re.search("after 20 steps.*longest=200", said[0]) and "no end after 200" in said[-1]
    assert not told(lambda: episode_returns(
        lambda obs: np.ones(len(obs), int), 0, 2, lambda: Own(steps=15), longest=200))[1]


class Mission(gym.Space):
    "A kind of space that Gymnasium does not know."
    def sample(self, mask=None, probability=None): return "go"
    def contains(self, x): return isinstance(x, str)


@pytest.mark.parametrize("shows", [Mission((), str), Dict(image=VECTOR, mission=Mission((), str)),
                                   gym.spaces.Text(5), gym.spaces.Sequence(Discrete(2))])
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_spaces_of_ones_own_are_named(shows, vectorization):
    with pytest.raises(ValueError, match="^env must have observations of Box"):
        PPO(lambda: Own(shows), **TINY, vectorization=vectorization)


@pytest.mark.parametrize("reward", [[1.0, 2.0], np.ones(1), np.ones((2, 2))], ids=str)
def test_a_reward_is_one_number(reward):
    with pytest.raises(ValueError, match="its reward must be one number, got "):
        told(lambda: PPO(lambda: Own(reward=reward), **TINY))


def test_a_recipe_leaves_out_what_the_environment_cannot():
    for env in gym.make("Pendulum-v1").unwrapped, gym.make_vec("Pendulum-v1", 16):
        ppo, said = told(lambda: PPO(env))
        assert ppo.config.gamma == 0.95
        assert ppo.config.stagger is not any("stagger=True, which is left off" in x for x in said)
    with pytest.raises(ValueError, match="stagger must be left off"):
        told(lambda: PPO(gym.make("Pendulum-v1").unwrapped, stagger=True))


@pytest.mark.parametrize("env", [None, "CartPole-v1"])
def test_a_loaded_trainer_writes_a_run(env, tmp_path):
    PPO("CartPole-v1", **TINY).learn(256).save(tmp_path / "p.pt")
    ppo = PPO.load(tmp_path / "p.pt", env=env, out=tmp_path / "run", track=[], eval_episodes=2)
    assert ppo.learn().iteration == 4
    assert (tmp_path / "run" / "summary.json").exists()
    with pytest.raises(ValueError, match="out must be a new directory"):
        PPO.load(tmp_path / "p.pt", env=env, out=tmp_path / "run")


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_close_that_raises_loses_nothing(vectorization):
    class Stuck(Own):
        def close(self): raise OSError("port gone")
    ppo = PPO(Stuck, **TINY, vectorization=vectorization).learn()
    _, said = told(ppo.close)
    assert vectorization == "async" or "the environment's close raised OSError: port gone" in said
    assert ppo.predict(np.zeros(2)) in (0, 1)


@pytest.mark.parametrize("callback", [5, "log", [print]])
def test_a_callback_is_a_function_before_anything_is_trained(callback):
    ppo = PPO("CartPole-v1", **TINY)
    with pytest.raises(TypeError, match="callback must be a function or None, got "):
        ppo.learn(callback=callback)
    async def later(ppo, row): return False
    def never(ppo, row): yield False
    for unrun in (later, never):
        with pytest.raises(TypeError, match="callback must be neither async nor a generator, got"):
            ppo.learn(callback=unrun)
    assert ppo.iteration == 0


@pytest.mark.parametrize("call, words", [
    (lambda: PPO(learning_rate=np.True_), "learning_rate must be .* got True"),
    (lambda: PPO(gamma=np.False_), "gamma must be .* got False"),
    (lambda: PPO(steps=np.True_), "steps must be .* got True"),
    (lambda: PPO(seed=2**64), "seed must be less .* got 18446744073709551616"),
    (lambda: PPO(**TINY).learn(steps=2**64), r"steps must be in \[1, 1e12\]"),
    (lambda: PPO(**TINY).evaluate(2**64), r"episodes must be in \[1, 1e6\]")])
def test_numbers_that_are_none_or_too_large(call, words):
    with pytest.raises(ValueError, match=words): call()
    ppo = PPO(**TINY | dict(seed=np.int64(3), learning_rate=np.float32(0.5)))
    assert (ppo.config.seed, ppo.config.learning_rate) == (3, 0.5)


def test_a_file_with_other_widths_is_refused_before_they_are_made(tmp_path):
    import time
    ppo = PPO("CartPole-v1", steps=1024)
    ppo.save(tmp_path / "p.pt")
    start = time.perf_counter()
    words = r"policy.0.weight must have shape \(16384, 4\), got \(64, 4"
    with pytest.raises(ValueError, match=words):
        PPO.load(tmp_path / "p.pt", hidden=2**14)
    assert time.perf_counter() - start < 5


def test_the_networks_of_pictures_are_those_of_their_papers():
    "Mnih et al. (2015), methods; Young and Tian (2019), section 4."
    assert policy.NATURE == ((32, 8, 4), (64, 4, 2), (64, 3, 1))
    assert policy.MINATAR == ((16, 3, 1),)
    assert picture_net((4, 84, 84))(torch.zeros(1, 4 * 84 * 84)).shape == (1, 64 * 7 * 7)
    assert picture_net((4, 10, 10))(torch.zeros(1, 400)).shape == (1, 16 * 8 * 8)
    assert CartPoleEnv  # drawn by us


class Sets(Own):
    "Changes what all of PyTorch does."
    def step(self, action):
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        return super().step(action)


@pytest.mark.parametrize("name, shape", [("learning_rate", "lr_anneal"), ("clip", "clip_anneal")])
def test_a_step_size_that_is_a_function_is_not_shaped_by_an_option(name, shape, tmp_path):
    options = {name: lambda left: 0.1 * left, shape: 2.0}
    for make in (PPO, lambda **more: PPO.load(tmp_path / "a.pt", **more)):
        with pytest.raises(ValueError, match=f"^{shape} must be left out where {name} is a func"):
            make(**options)


def test_options_of_what_is_made_are_refused_where_it_is_made():
    envs = gym.make_vec("CartPole-v1", 4)
    for name, x in dict(vectorization="async", env_kwargs=dict(sutton_barto_reward=True)).items():
        with pytest.raises(ValueError, match=f"^{name} must be left out for environments that are"):
            PPO(envs, **TINY | {name: x})
    PPO(envs, vectorization="auto", env_kwargs=None, **TINY)
    envs.close()


def test_what_an_environment_sets_for_all_of_pytorch_is_put_back():
    def rows(make): return PPO(make, eval_every=256, eval_episodes=2, **TINY).learn().rows
    assert rows(Sets) == rows(Own)
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


class Mute(Exception):
    def __str__(self): raise RuntimeError("no text")


def test_an_error_without_a_text_is_told_by_its_kind():
    class Fails(Own):
        def step(self, action): raise Mute
    def none(): raise Mute
    for make in (Fails, none):
        with pytest.raises(ValueError, match="^env must be .* Mute|raised Mute"):
            PPO(make, **TINY)


def test_weights_begin_as_in_the_literature():
    def norms(layer): return layer.weight.detach().flatten(1).norm(dim=1)
    agent = PPO(**TINY).agent
    last = [m for m in agent.policy.modules() if isinstance(m, torch.nn.Linear)][-1]
    torch.testing.assert_close(norms(last), torch.full((2,), 0.01))
    picture = picture_net((4, 10, 10), "orthogonal", torch.Generator())
    torch.testing.assert_close(norms(picture[1]), torch.full((16,), 2 ** 0.5))
