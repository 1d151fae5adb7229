"Control on a GPU: the CPU's first iteration, and a training that changes its device."
import pytest
import torch
from pretend import inner
from same import assert_rows

from rlhf_notes.control.trainer import PPO

SMALL = {"CartPole-v1": dict(num_envs=8, num_steps=16, steps=8 * 16 * 3),
         "Pendulum-v1": dict(num_envs=4, num_steps=32, steps=4 * 32 * 3)}
slow = pytest.mark.slow  # `make test-all` alone
each_env = pytest.mark.parametrize("env", SMALL)


def make(env, device): return PPO(env, device=device, eval_episodes=4, **SMALL[env])


@each_env
@pytest.mark.parametrize(
    "device",
    ["cuda",
     pytest.param("cuda:1",
                  marks=[slow,
                         pytest.mark.skipif(torch.cuda.device_count() < 2,
                                            reason="there is no second GPU")])])
def test_the_first_iterations_are_those_of_the_cpu(env, device):
    ours, cpu = make(env, device), make(env, "cpu")
    for _ in range(2): assert_rows([ours.iterate()], [cpu.iterate()])
    assert all(
        p.device == torch.device("cuda", int(device[-1] == "1")) for p in ours.agent.parameters())
    assert len(ours.evaluate(3)) == 3
    assert ours.predict(ours.envs.single_observation_space.sample()) is not None


@each_env
@pytest.mark.parametrize(
    "start, then", [("cuda", "cpu"), ("cpu", "cuda"), pytest.param("cuda", "cuda", marks=slow)])
def test_a_saved_training_goes_on_where_it_is_loaded(env, start, then, tmp_path):
    ppo = make(env, start)
    ppo.iterate()
    ppo.save(tmp_path / "ppo.pt")
    one, other = (PPO.load(tmp_path / "ppo.pt", device=d) for d in (start, then))
    assert_rows([other.iterate()], [one.iterate()])
    for p, q in zip(one.agent.parameters(), other.agent.parameters(), strict=True):
        torch.testing.assert_close(inner(p), inner(q), rtol=1e-3, atol=1e-4)
