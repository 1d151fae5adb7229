"Situations that people reported to other libraries, tried here."
import re
import warnings
from decimal import Decimal
from fractions import Fraction

import gymnasium as gym
import numpy as np
import pytest
import torch
import transformers
from gymnasium.spaces import Box, Dict, Discrete, Sequence, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from language.parts import without_times
from language.test_own_task import SMALL, count, make, own, tokenizer
from language_models import ROTARY

from rlhf_notes import DPO, PPO, RLHF
from rlhf_notes.hub.load import Classifier, load_model

FEW = dict(steps=32, num_envs=2, num_steps=16, minibatches=2, epochs=1, eval_episodes=2)
CHATML = ("{% for m in messages %}w3 {{ m['content'] }} w4 {% endfor %}"
          "{% if add_generation_prompt %}w6{% endif %}")


class Three(gym.Env):
    "Episodes of three steps."
    def __init__(self, observations=None, actions=None):
        self.observation_space = observations or Box(-1, 1, (3,))
        self.action_space = actions or Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.t += 1
        return self.observation_space.sample(), 1.0, self.t >= 3, False, {}


class Masked(Three):
    def action_masks(self): return np.array([True, False])


def asked(lm):
    lm.config.return_dict = False
    return lm


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_a_model_whose_config_asks_for_tuples_learns_alike(kind):
    rows = []
    for change in (lambda lm: lm, asked):
        torch.manual_seed(0)
        lm = change(make(kind))
        rows.append(RLHF(lm, tokenizer(), ["w3 w4"], count, iterations=2, **SMALL).learn().rows)
    assert without_times(rows[0]) == without_times(rows[1])


def test_a_reward_model_whose_config_asks_for_tuples_scores_alike():
    config = transformers.Qwen2Config(**ROTARY, num_labels=1)
    torch.manual_seed(0)
    model, t = transformers.Qwen2ForSequenceClassification(config), tokenizer()
    scores = [Classifier(change(model), tokenizer=t)(["w3 w4", "w5"])
              for change in (lambda lm: lm, asked)]
    assert torch.equal(*scores)


@pytest.mark.parametrize("make_lm, error", [
    (lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=37, d_model=16, d_ff=16, num_layers=1, num_heads=2)),
     "model must be a decoder alone, got 'T5ForConditionalGeneration', which has an encoder"),
    (lambda: torch.nn.DataParallel(make("GPT2")), r"got 'DataParallel' .*its \.module"),
])
def test_a_model_of_another_kind_is_refused_with_what_helps(make_lm, error):
    with pytest.raises(ValueError, match=error): load_model(make_lm(), tokenizer())


@pytest.mark.parametrize("prompts", [
    lambda: iter(["w3", "w5"]), lambda: np.array(["w3", "w5"]), lambda: {"w3": 0, "w5": 0}.keys()])
def test_held_out_prompts_come_as_prompts_do(prompts):
    rlhf = own(reward=count, eval_prompts=prompts(), eval_every=1).learn()
    assert rlhf.rows[-1]["eval_score"] is not None


def test_no_held_out_prompts_are_none():
    assert own(reward=count, eval_prompts=None).evaluator is None


def test_numbers_of_any_kind_are_rewards():
    mixed = [Decimal("0.5"), Fraction(1, 2), np.float16(0.5), np.int8(2), True, torch.tensor(0.5)]
    rlhf = own(reward=lambda prompts, responses: [mixed[i % 6] for i in range(len(responses))])
    row = rlhf.iterate()
    expected = [float(mixed[i % 6]) for i in range(rlhf.config.batch)]
    assert row["score"] == pytest.approx(np.mean(expected))


@pytest.mark.parametrize("word", ["1", b"1", bytearray(b"1"), np.str_("1")])
def test_texts_are_no_rewards(word):
    with pytest.raises(ValueError, match="reward must return a list of numbers.*is no number"):
        own(reward=lambda prompts, responses: [word] * len(responses)).learn()


@pytest.mark.parametrize("reward", [
    lambda prompts, completions, **columns: [0.0] * len(completions),
    lambda completions: [0.0] * len(completions)])
def test_a_column_does_not_take_the_place_of_the_responses(reward):
    with pytest.raises(ValueError, match="prompts must have no column completions"):
        own(prompts=[dict(prompt="w3", completions="w4")], reward=reward)


def test_a_column_of_completions_comes_beside_the_responses():
    seen = []
    def reward(prompts, responses, completions):
        seen.append((set(completions), set(responses)))
        return [0.0] * len(responses)
    own(prompts=[dict(prompt="w3", completions="w99")], reward=reward, iterations=1).learn()
    assert seen[0][0] == {"w99"} and seen[0][1] != {"w99"}


@pytest.mark.parametrize("option, helps", [
    ("stop", "generation_config.eos_token_id"), ("stop_strings", "generation_config.eos_token_id"),
    ("system_prompt", "the role system"), ("reward_weights", "pairs, function and weight"),
    ("gradient_accumulation_steps", "microbatches"), ("warmup_steps", "lr_warmup")])
def test_what_other_libraries_have_is_told_in_our_words(option, helps):
    with pytest.raises(ValueError, match=f"^{option} must be an option of .*{re.escape(helps)}"):
        own(**{option: 1})


def test_a_prompt_that_begins_a_response_is_told():
    "TRL goes on with the last message; here another one begins."
    chat = [dict(role="user", content="w7"), dict(role="assistant", content="w8")]
    for prompts, told in ([chat], True), ([chat[:1]], False), (["w7"], False):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            own(prompts=prompts, reward=count, tok=tokenizer(CHATML))
        assert told == any("end with a message of the assistant" in str(w.message) for w in found)


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_a_response_of_another_role_is_refused(role):
    pair = dict(prompt="w3", chosen=[dict(role=role, content="w4")], rejected="w5")
    with pytest.raises(ValueError, match="chosen response, .* one message of the assistant"):
        DPO(make("GPT2"), tokenizer(), [pair], device="cpu")


@pytest.mark.parametrize("space", [Box(-1, 1, (3,)), Dict(a=Box(-1, 1, (2,)), b=Discrete(2))])
def test_a_step_that_resets_shows_the_last_observation(space):
    class Hides(gym.vector.VectorWrapper):
        def step(self, actions):
            *rest, info = self.env.step(actions)
            return (*rest, {k: x for k, x in info.items() if k != "final_obs"})
    envs = SyncVectorEnv([lambda: Three(space)] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(ValueError, match=r'^env must give info\["final_obs"\] in the step that'):
        PPO(Hides(envs), **FEW).learn()


@pytest.mark.parametrize("obs, where", [
    ((np.zeros(3), {}), "obs"), ([np.zeros(3), np.zeros(2)], "obs")])
def test_what_a_reset_returns_is_no_observation(obs, where):
    with pytest.raises(ValueError, match=f"^{where} must be an array, or a list of numbers, got a"):
        PPO(Three, **FEW).predict(obs)


def test_masks_that_are_not_read_are_told():
    "sb3-contrib calls the environment's action_masks()."
    for make_env in Masked, lambda: gym.wrappers.TimeLimit(Masked(), 5):
        with pytest.warns(UserWarning, match="action_masks, which is not read"):
            PPO(make_env, **FEW)


def test_the_hint_on_observations_is_for_the_space_that_came():
    for space, hint in ((Sequence(Discrete(3)), False), (Dict(a=Sequence(Discrete(3))), True)):
        with pytest.raises(ValueError) as told: PPO(lambda space=space: Three(space), **FEW)
        assert ("FilterObservation" in str(told.value)) == hint


@pytest.mark.parametrize("space", [Tuple([Discrete(2)] * 2), Dict(a=Discrete(2)),
                                   Box(0, 5, (2,), np.int64)])
def test_actions_that_are_not_learned_come_with_what_helps(space):
    with pytest.raises(ValueError, match="env must have actions of .*TransformAction"):
        PPO(lambda: Three(actions=space), **FEW)


@pytest.mark.parametrize("options", [
    dict(reward=lambda prompts, responses: [1.0] + [None] * (len(responses) - 1)),
    dict(reward=count, overlong="filter")])
def test_a_minibatch_without_tokens_is_in_no_mean_of_the_log(options):
    "TRL's PPO counts it as zeros."
    for minibatches in 1, 2, 4, 8:
        rlhf = own(iterations=1, epochs=1, learning_rate=1e-12,
                   **options | dict(batch=8, group=8, minibatches=minibatches))
        row, part = rlhf.iterate(), rlhf.loop.advantages()
        which = part.response_mask.any(1).nonzero().flatten()
        mask, entropy = part.response_mask, rlhf.loop.forward(part)[1].detach()
        if len(which) == 1 or minibatches == 1:
            assert row["entropy"] == pytest.approx(entropy[mask].mean().item(), rel=1e-5)
            assert row["ratio"] == pytest.approx(1.0, abs=1e-5)
        assert row["entropy"] >= entropy[which].masked_fill(~mask[which], 9).min()


def test_a_saved_adapter_that_is_frozen_is_told_how_to_learn(tmp_path):
    peft = pytest.importorskip("peft")
    peft.get_peft_model(make("Llama"), peft.LoraConfig(target_modules="all-linear")
                        ).save_pretrained(tmp_path)
    frozen = peft.PeftModel.from_pretrained(make("Llama"), tmp_path)
    with pytest.raises(ValueError, match="lora= trains an adapter, and .*is_trainable=True"):
        load_model(frozen, tokenizer())


@pytest.mark.parametrize("kind", ["apo_zero", "apo_down"])
def test_a_loss_without_smoothing_refuses_it_before_the_training(kind):
    pair = dict(prompt="w3", chosen="w4", rejected="w5")
    with pytest.raises(ValueError, match="^label_smoothing must be left out for dpo_kind apo_"):
        DPO(make("GPT2"), tokenizer(), [pair], kind=kind, label_smoothing=0.1, device="cpu")


def test_predicting_without_the_masks_of_the_training_is_told():
    "sb3-contrib chooses among all actions, silently."
    class Told(Three):
        def _told(self, obs, *rest): return obs, *rest[:-1], dict(action_mask=np.array([1, 0]))
        def reset(self, **options): return self._told(*super().reset(**options))
        def step(self, action): return self._told(*super().step(action))
    for make_env, mask, told in ((Told, None, True), (Told, [1, 0], False), (Three, None, False)):
        ppo = PPO(make_env, **FEW)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            ppo.predict(np.zeros(3), action_mask=mask)
            ppo.evaluate(2)
        assert told == any("impossible actions may be chosen" in str(w.message) for w in found)
