"""A model, prompts and a reward, or pairs of responses: learn, generate, save, load.

A trainer holds [the loop](../../nbs/language/27_loop.ipynb) of its config, and the task in the
model's tokens. `generate` samples as the training does; `n=4` gives a list of four responses to
each prompt, another `temperature` is for looking, and 0 takes the likeliest token each time. With
`environment=` it plays whole dialogues where the prompts bring the columns of the training, and
shows the next turn alone where they do not.

```python
from rlhf_notes import DPO, RLHF

def likes_good(prompts, responses): return [r.split().count("good") for r in responses]

rlhf = RLHF("path/or/name", prompts=["about the hotel ."], reward=likes_good).learn()
rlhf.generate(["about the film ."])
pairs = [dict(prompt="about the hotel .", chosen="it was good .", rejected="it was bad .")]
dpo = DPO("path/or/name", prompts=pairs).learn()
```

*A teacher.* With `teacher=`, the advantage of a token is the teacher's log-probability less the
student's (lesson 39, distillation); `kl_k1` in the log is then the
divergence of whole responses. A reward is measured, and not learned from.

*An advantage of your own.* `advantage=f` puts f(rewards, mask) in the place of GRPO's: rewards and
mask (P, G), of G responses to each of P prompts; False = not scored; it returns a tensor (P, G).

*Pairs.* `kind="ipo"` and the other losses of a pair (lesson 12) take the place of DPO's;
`label_smoothing=0.1` is for people who err in one pair of ten. `chosen` and `rejected` are texts,
or the list with one message of the assistant that datasets of chats have there;
`rlhf_notes.hub.pairs` makes tokens of them.
"""

__all__ = ['GREEDY', 'Trainer', 'task_of', 'save_policy', 'unscored', 'own_advantage', 'RLHF',
           'DPO']

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from ..checks import check_context, check_value, told_as
from ..formulas.advantage import advantage_of
from ..formulas.masking import centre
from ..language.config import TAUGHT, LoopConfig, check_variant
from ..language.dpo import DPOLoop
from ..language.loop import Loop
from ..language.machine import make_machine
from ..language.model import autocast
from ..language.rollout import ADVANTAGES, group_advantages, weighted_sum
from ..training.devices import make_accelerator, process_device, stopped_anywhere, usual_defaults
from ..training.fit import (
    Evaluator, as_hooks, check_schedules, fit, progress_bar, step_size,
)
from ..training.options import read_options
from ..training.runs import check_sums
from ..training.seeds import seeded_generator
from ..training.signals import end_later
from ..view import View, own_run
from .config import OwnConfig, OwnDPOConfig, known_options
from .load import load_model, other_tokens
from .pairs import own_choices
from .prompts import Prompts, read_prompts, warn_of_ends
from .recorder import Recorder
from .save import save_model
from .spread import Warnings, draw_again
from .told import Hint, observing_loss
from .turns import Turns


GREEDY = 1e-6  # so low a temperature leaves the likeliest token alone


class Trainer:
    "A loop with its model, its tokenizer and its task, as users hold it."
    hooks = ()  # of `learn`, each called with the trainer and the row of an iteration
    OURS = LOOP = Loop  # the loop, and perhaps a user's in its place

    def _load_parts(self, config, model, tokenizer, prompts, reward, environment=None):
        "Load, check and adapt a model; read the prompts in its tokens; the model and its machine."
        c, order = config, getattr(config, "prompt_order", "epochs")  # of pairs, by DPO itself
        lm, tokenizer = load_model(model, tokenizer, process_device(c.device), c.lora, c.seed)
        machine = make_machine(c, torch.device(lm.device))
        machine.check_same(**{name: x for name, x in asdict(c).items() if name != "device"})
        machine.agree(lm)
        self.task = task_of(environment)(
            tokenizer, prompts, reward, c.response_length, c.prompt_length, c.stop_after, lm=lm,
            drop_long=c.long_prompts == "filter", order=order, seed=c.seed, top_p=c.top_p,
            top_k=c.top_k)
        longest, texts = machine.largest(self.task.prompt_length), self.task.rows
        machine.check_same(rewards=len(self.task.rewards))
        if order == "epochs":
            machine.check_same(prompts=(len(texts), texts[:1], texts[-1:]))
        if texts:
            self.task.widen(longest)
        lengths = {"prompt_length" if c.prompt_length else "prompts": self.task.prompt_length}
        check_context(lm, **lengths, max_new_tokens=c.response_length)
        self.rows, self.evaluator = [], None
        return lm, machine

    def _put_over(self, option, **own):
        "Let functions of an option take the place of the loop's methods, but of no user's."
        for name in own:
            if getattr(self.LOOP, name) is not getattr(self.OURS, name):
                raise ValueError(f"{option} must be left out with a LOOP that has a {name} of its "
                                 f"own, got {self.LOOP.__name__}")
        self.loop.put(**own)

    def _follow(self, schedule):
        "In place of the loop's rate: a function of the share of iterations that is left, if any."
        if schedule is not None:
            self._put_over("learning_rate", rate=partial(own_rate, schedule))

    @property
    def config(self) -> LoopConfig:
        "The options, with all that was left to the trainer."
        return self.loop.config

    @property
    def policy(self):  # `Policy`
        "The model in training, with its value head."
        return self.loop.policy

    @property
    def rollout(self):  # `Rollout`
        "The newest responses, before they were learned from."
        return self.loop.rollout

    @property
    def iteration(self) -> int:
        "Iterations that are done."
        return self.loop.iteration

    @property
    def left(self) -> bool:
        "True while iterations are left."
        return self.iteration < self.config.iterations

    def iterate(self) -> dict:  # column -> number
        "One iteration: its row of metrics."
        self.rows.append(self.loop.iterate())
        return self.rows[-1]

    @usual_defaults("policy", "task.reward_models")
    def learn(
        self,
        callback=None,  # callback(trainer, row) after each iteration; False ends the training
    ) -> "Trainer":  # itself, with the metrics in `rows`
        "Run the iterations that are left; Ctrl-C stops after the current one."
        bar = progress_bar(self.config.iterations, self.iteration, self.config.algo)
        if self.evaluator:
            self.evaluator.go_on()
        with end_later():
            fit(self, bar, shown=dict(score="score"),
                hooks=as_hooks(*self.hooks, self.evaluator, callback),
                stopped=partial(stopped_anywhere, make_accelerator()))
            if self.evaluator:
                self.evaluator.take_best()
        return self

    @usual_defaults("policy")
    def evaluate(self) -> float:
        "Mean score of responses to the held-out prompts, always by the same random numbers."
        task, generator = self.held_out, seeded_generator("evaluation", self.config.seed)
        found = self._respond(task.respond, task.tokens, task.mask, task.rows, generator)
        scores = [weighted_sum(task.score(*part), task.weights.to(part[0].device))
                  for part in found]
        mean = torch.cat(scores).nanmean()[None]
        return self.loop.machine.gather(mean).nanmean().item()  # the same in each process

    @usual_defaults("policy")
    def generate(
        self,
        prompts: list,  # strings or chats; with columns, for an environment
        seed: int = 0,  # other seeds, other responses
        *,
        n: int = 1,  # responses to each prompt
        temperature: float | None = None,  # None = that of the training; 0 = the likeliest tokens
    ) -> list:  # a string for each prompt; with n > 1, a list of n strings
        "Responses to prompts."
        check_value("n", n, "int [1, inf)")
        check_value("temperature", temperature, "[0, inf)?")
        task, generator = self.task, seeded_generator("generate", seed)
        rows = [row for row in read_prompts(prompts) for _ in range(n)]
        tokens, mask = (x.repeat_interleave(n, 0) for x in task.encode(prompts))
        check_context(self.policy.lm, prompts=tokens.shape[1],
                      max_new_tokens=self.config.response_length)
        whole = task.rows and rows[0].keys() >= task.rows[0].keys()  # an environment asks for them
        respond = task.respond if whole else partial(Prompts.respond, task)
        parts = self._respond(respond, tokens, mask, rows, generator, temperature)
        texts = [text for *_, found in parts for text in task.decode(found.whole)]
        return texts if n == 1 else [texts[i:i + n] for i in range(0, len(texts), n)]

    @torch.no_grad()
    def _respond(self, respond, tokens, mask, rows, generator, temperature=None):
        "Prompts, their mask and `Responses`, batch by batch."
        c, device, B = self.config, self.loop.device, self.config.batch
        temperature = c.temperature if temperature is None else max(temperature, GREEDY)
        u = torch.rand(len(tokens), c.response_length, generator=generator)
        for i in range(0, len(rows), B):
            inputs = [x[i:i + B].to(device) for x in (tokens, mask, u)]
            with autocast(device, c.precision):
                found = respond(self.policy.lm, *inputs, rows[i:i + B], temperature)
            yield *inputs[:2], found

    def save(
        self,
        path,  # a directory
        merge: bool = False,  # True = an adapter is added to the weights
        dtype: str | None = None,  # "float32" or "bfloat16"; None = as the policy has it
    ):
        "Write policy, tokenizer and options; `AutoModelForCausalLM` loads the policy from there."
        save_policy(path, self.config, self.policy.lm, self.task.tokenizer, merge, dtype)


def task_of(environment):
    "The kind of task: prompts that are answered, or dialogues with an environment."
    return Prompts if environment is None else partial(Turns, environment=environment)


def save_policy(path, config, lm, tokenizer, merge=False, dtype=None):
    "Write a policy with what it was sampled with, and the options of its training, rlhf.json."
    files = {"rlhf.json": json.dumps(asdict(config), indent=1) + "\n"}
    save_model(Path(path), lm, tokenizer, merge, dtype, files, temperature=config.temperature,
               max_new_tokens=config.response_length)


def own_schedule(options):
    "Take out of the options a learning rate that is a function of the iterations that are left."
    check_schedules(options, learning_rate=["lr_anneal", "lr_warmup"])
    return options.pop("learning_rate") if callable(options.get("learning_rate")) else None


def own_rate(schedule, loop):
    "In place of `Loop.rate`: the rate by a function of the share of iterations that is left."
    return step_size("learning_rate", schedule, 1 - loop.iteration / loop.iterations)


def unscored(prompts, responses):
    "The reward of a training without one: zeros."
    return [0.0] * len(responses)


def own_advantage(function, config, score, total, scored, *_):
    "An advantage of the user's own, function(rewards, mask), less the KL as for GRPO."
    return advantage_of(function, score, scored) + centre(total - score, scored, 1)


EXCLUSIVE = "teacher", "hint", "advantage", "turn_credit"  # each is an advantage of its own


def check_ways(config, environment, **given):
    "ValueError names what was given to learn by and does not go with the other options."
    check_value("observation_coef", given.get("observation_coef"), "[0, inf)?")
    check_value("turn_credit", given.get("turn_credit"), ("leave-one-out", None))
    if not callable(given.get("hint", print)):
        raise ValueError(f"hint must be a function, got {given['hint']!r}")
    plain = (config.algo, config.reward_aggregation) == ("grpo", "sum")
    if not (callable(given.get("advantage", print)) and (plain or "advantage" not in given)):
        raise ValueError("advantage must be a function, for algo grpo and the sum of the rewards, "
                         f"got {given['advantage']!r}")
    both = [name for name in EXCLUSIVE if name in given]
    both += [name for name in given if name == "observation_coef" and "hint" in given]
    if len(both) > 1:
        raise ValueError(f"{both[1]} must be left out with {both[0]}, got {given[both[1]]!r}")
    for name in given.keys() & {"turn_credit", "observation_coef"}:
        if environment is None:
            raise ValueError(f"{name} must be left out without an environment, got {given[name]!r}")
    if "turn_credit" in given and (config.algo == "ppo" or config.reward_aggregation != "sum"):
        raise ValueError("turn_credit must be left out for algo ppo, and for rewards that are "
                         f"normalised each, got {given['turn_credit']!r}")


class RLHF(Trainer):
    "Reinforcement learning of a language model by a reward of one's own."

    @usual_defaults()
    def __init__(
        self,
        model,  # a causal language model: its name, its directory, or the model itself
        tokenizer=None,  # of a model that is given itself
        prompts=(),  # strings, chats, dicts with columns for the reward; or a file
        reward=None,  # reward(prompts, responses, **columns) -> numbers; or a list of such
        algo: str = "grpo",  # "ppo", "grpo" or "rloo"
        max_new_tokens: int = 16,  # tokens of each response
        iterations: int = 60,  # rollouts, each followed by an update
        seed: int = 0,  # of all that is random
        *,
        teacher=None,  # a model of the same tokens, to learn from in place of the reward
        environment=None,  # replies to each turn: environment(prompts, responses, **columns)
        turn_credit: str | None = None,  # "leave-one-out": an advantage for each turn of a dialogue
        observation_coef: float | None = None,  # weight of predicting the environment's replies
        hint=None,  # hint(prompts, responses, **columns) -> texts: learn from oneself, told them
        advantage=None,  # f(rewards (P, G), mask) -> (P, G), in place of GRPO's
        eval_prompts=(),  # held-out prompts, of the same kinds
        eval_reward=None,  # what scores the responses to them; None = `reward`
        eval_every: int | None = None,  # iterations from one evaluation to the next; None = 10
        keep_best: bool = False,  # end with the policy of the best evaluation, not with the last
        reward_timeout: float | None = None,  # seconds for each call of a reward; None = no limit
        **options,  # of `OwnConfig`; learning_rate as a function of the iterations that are left
    ):
        check_value("reward_timeout", reward_timeout, "(0, inf)?")
        check_value("max_new_tokens", max_new_tokens, "int [1, inf)")
        ways = dict(observation_coef=observation_coef, teacher=teacher, hint=hint,
                    advantage=advantage, turn_credit=turn_credit)
        given = {name: x for name, x in ways.items() if x is not None}
        for name in given.keys() & {"teacher", "hint"}:
            if algo == "ppo":
                raise ValueError(f"algo must be grpo or rloo with a {name}, which needs no values, "
                                 "got ppo")
            algo, reward = name, reward or unscored
        schedule = own_schedule(options)
        config = OwnConfig(algo=algo, iterations=iterations, seed=seed,
                           response_length=max_new_tokens, **options)
        check_variant(config)
        check_ways(config, environment, **given)
        compare = ADVANTAGES[turn_credit] if turn_credit else None
        if advantage is not None:
            compare = partial(group_advantages, partial(own_advantage, advantage))
        self._begin(config, model, tokenizer, prompts, reward, environment, compare, teacher, hint,
                    observation_coef)
        self.task.reward_timeout = reward_timeout
        self._follow(schedule)
        check_value("eval_every", eval_every, "int [1, inf)?")
        eval_prompts = [] if eval_prompts is None else read_prompts(eval_prompts)
        self.loop.machine.check_same(eval_prompts=len(eval_prompts) > 0, eval_every=eval_every,
                                     keep_best=keep_best)
        if eval_prompts:
            self._hold_out(eval_prompts, eval_reward or reward, eval_every or 10, keep_best)
        elif eval_every or eval_reward or keep_best:
            raise ValueError("eval_prompts must be given with eval_every, eval_reward or keep_best,"
                             " got none")

    def _begin(self, config, model, tokenizer, prompts, reward, environment=None, compare=None,
               teacher=None, hint=None, observation_coef=None):
        if config.algo in ("dpo", *TAUGHT) and reward is not None and not (teacher or hint):
            raise ValueError("algo must be ppo, grpo or rloo to learn from a reward, got "
                             f"{config.algo}")
        lm, machine = self._load_parts(config, model, tokenizer, prompts, reward, environment)
        warn_of_ends(self.task)
        self.recorder = Recorder()
        self.hooks = [self.recorder] if config.algo in TAUGHT else [Warnings(), self.recorder]
        self.loop = self.LOOP(config, lm, self.task, self.task.score, machine, compare)
        if config.dynamic_sampling:
            self._put_over("dynamic_sampling", draw=draw_again)
        if hint is not None:
            self._put_over("hint", reference_logp=Hint(hint, self.task))
        if observation_coef is not None:
            self._put_over("observation_coef", loss=partial(observing_loss, observation_coef))
        if teacher is not None:
            self.loop.reference = self._load_teacher(teacher)

    def _load_teacher(self, teacher):
        "A model to stand where the reference would; ValueError if its tokens are others."
        own, is_name = self.task.tokenizer, isinstance(teacher, str | Path)
        alone = not is_name or (Path(teacher).is_dir()
                                and not Path(teacher, "tokenizer_config.json").exists())
        with told_as(dict(model="teacher")):
            found, theirs = load_model(teacher, own if alone else None, self.loop.device)
        sizes = [len(x.get_output_embeddings().weight) for x in (self.policy.lm, found)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"teacher must have the model's vocabulary of {sizes[0]} tokens, got "
                             f"{sizes[1]}")
        if unlike := other_tokens(own, theirs):
            token, number, its = unlike
            raise ValueError(f"teacher must have the model's tokens, got {its} as the number of "
                             f"{token!r}, which is {number} to the model")
        return found

    def _hold_out(self, prompts, reward, every, keep_best):
        "Evaluate on prompts of their own."
        c, lm = self.config, self.policy.lm
        kind = task_of(getattr(self.task, "environment", None))
        self.held_out = kind(self.task.tokenizer, prompts, reward, c.response_length, 0,
                             c.stop_after, lm=lm)
        self.held_out.reward_timeout = self.task.reward_timeout
        check_context(lm, eval_prompts=self.held_out.prompt_length,
                      max_new_tokens=c.response_length)
        self.evaluator = Evaluator(self.evaluate, every, keep=self._keep if keep_best else None,
                                   put=self._put)

    def _keep(self):
        self.loop.tie()
        return self.loop.optimizer.vector.detach().clone()

    def _put(self, kept):
        self.loop.tie()
        self.loop.optimizer.vector.detach().copy_(kept)

    def view(
        self,
        path=None,  # an .html file to write; None = none
    ) -> View:  # shows in a notebook
        "Look at the responses of the training, token by token; the page needs no network."
        if self.rows and not self.recorder.records:  # without `learn`
            self.recorder.look(self.loop, self.rows[-1], now=True)
        view = View(own_run(self.recorder.state_dict(), self.rows))
        if path is not None:
            view.save(path)
        return view

    @property
    def kl(self):  # `AdaptiveKLController` or `FixedKLController`
        "The controller of the KL coefficient."
        return self.loop.kl

    @classmethod
    @usual_defaults()
    def load(
        cls,
        path,  # a directory that `save` has written
        prompts: list = (),  # to learn from, with `reward`
        reward=None,  # reward(prompts, responses, **columns) -> numbers; or a list of such
    ) -> "RLHF":  # the saved policy is the new reference
        "A saved policy, ready to generate; with prompts and a reward, to learn further."
        try:
            saved = read_options(Path(path) / "rlhf.json")
        except (OSError, ValueError) as e:
            raise ValueError("path must be a directory that RLHF.save has written, got "
                             f"{path}: {e}") from e
        kind = OwnDPOConfig if saved.get("algo") == "dpo" else OwnConfig
        trainer, config = cls.__new__(cls), kind(**known_options(kind, saved))
        check_sums(path)
        if reward is not None:
            check_variant(config)
        trainer._begin(config, path, None, prompts, reward)
        return trainer


class DPO(Trainer):
    "Direct preference optimization: a policy from pairs of responses."
    OURS = LOOP = DPOLoop

    @usual_defaults()
    def __init__(
        self,
        model,  # a causal language model: its name, its directory, or the model itself
        tokenizer=None,  # of a model that is given itself
        prompts=(),  # dicts with prompt, chosen and rejected; or a .jsonl file of them
        max_new_tokens: int = 16,  # tokens of the longest response, with its end
        iterations: int = 60,  # of `batch` prompts each
        seed: int = 0,  # of all that is random
        *,
        kind: str = "sigmoid",  # the loss of a pair, one of `DPO_KINDS`
        label_smoothing: float = 0.0,  # share of the pairs taken to be the wrong way round
        **options,  # of `OwnDPOConfig`; learning_rate as a function of the iterations left
    ):
        check_value("max_new_tokens", max_new_tokens, "int [1, inf)")
        schedule = own_schedule(options)
        config = OwnDPOConfig(iterations=iterations, seed=seed, response_length=max_new_tokens,
                              dpo_kind=kind, label_smoothing=label_smoothing, **options)
        lm, machine = self._load_parts(config, model, tokenizer, prompts, None)
        choices = own_choices(self.task, self.task.rows)
        self.loop = self.LOOP(config, lm, self.task, choices, machine)
        self._follow(schedule)
