"""Plant one failure of RLHF at a time, over many seeds.

    python benchmarks/failures.py --jobs 2

Writes into nbs/studies/results: failures.csv, a row for each training (the policy's worth on
held-out prompts, the iteration in which its true score was first 2, the iteration in which a number
was not finite, the mean of each dial over the iterations). Writes into rlhf_notes/studies, where
the game of the lesson finds them: dials.csv, the dials in each iteration, of all failures with seed
0 and of the intact trainings with every seed; failures_list.csv, what each failure is. Trainings
that stand in the files are not repeated, so after a change of the defaults say --fresh.
`nbs/studies/37_failures.ipynb` says what came of it.

Surprising rows again, with other seeds:

    python benchmarks/failures.py --first 100 --only "NAME" "NAME"
"""
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from ablations import swapped, unclipped
from jobs import RESULTS, options, read, side_by_side, text, write
from torch import nn

from rlhf_notes.formulas import grpo
from rlhf_notes.formulas.kl import kl_estimate
from rlhf_notes.formulas.preference import bradley_terry_loss
from rlhf_notes.formulas.reward import RewardNorm
from rlhf_notes.hub import prompts
from rlhf_notes.language import loop, model, rollout
from rlhf_notes.language import sampling as sample
from rlhf_notes.reviews import reward_model
from rlhf_notes.reviews.config import ReviewsConfig
from rlhf_notes.reviews.pipeline import evaluate
from rlhf_notes.reviews.reward_model import RewardTraining
from rlhf_notes.studies import variants
from rlhf_notes.studies.variants import measure, prepare

PRETRAINED = "pretrained"
BASES = {  # the intact trainings: options of `ReviewsConfig`
    "ppo": {},
    "cooler": dict(temperature=0.7),
    "grpo": dict(algo="grpo", kl_target=0.0),
}
DIALS = ("score", "kl_k1", "entropy", "length", "valid", "approx_kl", "clip_fraction", "ratio",
         "value_loss", "value_clip_fraction", "explained_variance", "grad_norm", "kl_coef")
OUTCOME = ("proxy", "true", "kl", "valid", "win", "first", "broke")
COLUMNS = ("failure", "seed", *OUTCOME, *(f"mean_{d}" for d in DIALS))
WORTH, LOOK = 2.0, 10  # the true score that counts as learned; iterations between two looks
GAME = RESULTS.parents[2] / "rlhf_notes" / "studies"
SECONDS = 16           # of one training, on a quiet core
FRESH = 100            # seeds from here on are for doing surprising rows again


def scored_alone(score): # `RewardModel.score`, of prompt and response
    "The reward model reads the response without its prompt."
    return lambda model, prompts, mask, responses, counts: model(responses, counts)


def padding_read(hidden_states): # `model.hidden_states`, which goes by the mask
    "Padding is token 0, and nothing hides it."
    return lambda lm, tokens, mask, at=None: hidden_states(lm, tokens.masked_fill(~mask, 0),
                                                           torch.ones_like(mask), at)


def padding_sampled(sample): # `sampling.sample`, which goes by the mask
    "The sampler reads padding as token 0."
    def blind(lm, prompts, mask, u, temperature, **options):
        prompts = prompts.masked_fill(~mask, 0)
        return sample(lm, prompts, torch.ones_like(mask), u, temperature, **options)
    return blind


def places(position_ids): # `model.position_ids`, which counts real tokens alone
    "Positions count the padding."
    return lambda mask: torch.arange(mask.shape[-1], device=mask.device).expand(mask.shape)


def places_in_update(Policy): # `model.Policy`, called in the update alone
    "The same, in the update alone: responses are sampled with the right positions."
    class Misplaced(Policy):
        def forward(self, *args):
            with swapped((model, "position_ids", places)): return super().forward(*args)
    return Misplaced


def likeliest(draw): # `sample.draw`, among all V tokens
    "Tokens are sampled among the five likeliest; their log-probabilities are those among all."
    def among_five(logits, temperature, u):
        fifth = logits.topk(5).values[..., -1:]
        return draw(logits.masked_fill(logits < fifth, -torch.inf), temperature, u)
    return among_five


def constant(learning_rate): # `loop.learning_rate`, linear to 0
    "The learning rate does not fall."
    return lambda config, iteration: config.learning_rate


def twice(prompts): # `Loop.prompts`: prompts (B, Q), mask (B, Q) and u (B, T)
    "Two processes with one seed: the second half of the batch is the first once more."
    def again(*args):
        *tensors, rows = prompts(*args)
        return *(torch.cat([x[:len(x) // 2]] * 2) for x in tensors), rows[:len(rows) // 2] * 2
    return again


def read_at_the_edge(RewardModel): # `model.RewardModel`, which reads it off the last real token
    "The score is read off the last position, padding or not."
    class Edge(RewardModel):
        def forward(self, tokens, mask):
            states = model._states.__wrapped__(self.trunk, tokens.masked_fill(~mask, 0), mask,
                                               model.position_ids(mask), mask)
            return model._float32(self.head, states[:, -1])
    return Edge


def loud(RewardModel): # `model.RewardModel`, whose head begins with 1 / sqrt(d + 1)
    "The head begins with weights of standard deviation 1."
    class Loud(RewardModel):
        def __init__(self, *args):
            super().__init__(*args)
            with torch.no_grad(): self.head.weight.mul_((self.head.in_features + 1) ** 0.5)
    return Loud


def one_pair(best_of_n_loss): # `reward.best_of_n_loss`, of rewards (B, N) and best (B,)
    "Of the four responses the best is compared with one other."
    def loss(rewards, best):
        i = torch.arange(len(best), device=best.device)
        return bradley_terry_loss(rewards[i, best], rewards[i, (best + 1) % rewards.shape[1]])
    return loss


def raw_scores(start): # With a norm that gives them mean 0 and standard deviation 1
    "Scores as the reward model gives them."
    return replace(start, norm=RewardNorm())


def scaled_before_training(start): # With the norm of the trained one
    "Gain and bias are those of the reward model before it was trained."
    return replace(start, norm=RewardTraining(start.config, start.lm, start.task).norm)


def temperature_forgotten(selective_log_softmax): # `logprob.selective_log_softmax`
    "Log-probabilities at temperature 1, not at the sampler's."
    return lambda logits, index, temperature: selective_log_softmax(logits, index)


def opinionated(Policy): # `model.Policy`, whose value head begins with 0
    "The value head begins with weights of standard deviation 1."
    class Opinionated(Policy):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            nn.init.normal_(self.value_head.weight)
    return Opinionated


def thinned(Policy): # `model.Policy`, of a language model without dropout
    "Dropout of 0.1 stays on in the update."
    class Thinned(Policy):
        def __init__(self, lm, *args, **kwargs):
            super().__init__(lm, *args, **kwargs)
            for module in lm.modules():
                if isinstance(module, nn.Dropout): module.p = 0.1
    return Thinned


class Unfinished:
    "The task, with prompts that lack their full stop."
    def __init__(self, task): self.task = task # The right one, as `Reviews`
    def __getattr__(self, name): return getattr(self.task, name)
    def sample_prompts(self, *args): # As of the task: n, generator
        "Prompts and mask, (n, Q), one place to the right: the full stop becomes padding in front."
        *prompts, rows = self.task.sample_prompts(*args)
        prompts, mask = (x.roll(1, 1) for x in prompts)
        mask[:, 0] = False
        return prompts, mask, rows


class Untruncated:
    "The task, with responses that go on to their last token, all of them with an end."
    def __init__(self, task): self.task = task # The right one, as `Reviews`
    def __getattr__(self, name): return getattr(self.task, name)
    def truncate(self, responses): # (B, T) -> responses; mask (B, T) and has_end (B,), all True
        "Nothing is cut."
        mask = torch.ones_like(responses, dtype=torch.bool)
        return responses, mask, mask[:, 0]
    def respond(self, *args): # As of the task
        found = self.task.respond(*args)
        whole, mask, has_end = self.truncate(found.tokens)
        return replace(found, whole=whole, said=whole, mask=mask, has_end=has_end)


def on_task(kind): # A class around a task: `Unfinished`, `Untruncated`
    "A change of the start: another task for the policy."
    return lambda start: replace(start, task=kind(start.task))


def weighed_alike(rl_loss): # `loop.rl_loss`, whose parts share the weights of their minibatch
    "The mean of the microbatches' means."
    def alike(config, part, *now):
        loss, stats = rl_loss(config, part, *now[:4])
        n = config.microbatches
        return loss / n, {name: x / n for name, x in stats.items()}
    return alike


def k3_in_reward(token_rewards): # `reward.token_rewards`, which takes k1
    "The KL in the reward is estimated by k3."
    def rewards(scores, logp, logp_ref, coef, mask):
        k3 = kl_estimate(logp, logp_ref, "k3")
        return token_rewards(scores, k3, torch.zeros_like(k3), coef, mask)
    return rewards


def reversed_reward(token_rewards): # `reward.token_rewards`, of log pi - log pi_ref
    "The log-ratio of the KL in the reward has the wrong sign."
    return lambda scores, logp, logp_ref, *rest: token_rewards(scores, logp_ref, logp, *rest)


def paid_at_the_edge(token_rewards): # `reward.token_rewards`, which goes by the mask
    "The score lands on the last position, padding or not; the KL is summed up to there."
    return lambda scores, logp, logp_ref, coef, mask: token_rewards(scores, logp, logp_ref, coef)


def paid_everywhere(token_rewards): # `reward.token_rewards`, which pays the last one alone
    "Each token of a response gets the whole score."
    def rewards(scores, logp, logp_ref, coef, mask):
        _, penalty = token_rewards(scores, logp, logp_ref, coef, mask)
        return penalty + scores[:, None] * mask, penalty
    return rewards


def k1_in_loss(policy_loss): # `grpo.policy_loss`, which takes k3 times the ratio
    "The KL in the loss is estimated by k1, without the ratio."
    changed = dict(kl_kind="k1", kl_weighted=False)
    return lambda *args, **kwargs: policy_loss(*args, **kwargs | changed)


def reversed_estimate(kl_estimate): # `kl.kl_estimate`, of log pi - log pi_ref
    "The log-ratio of the KL in the loss has the wrong sign."
    return lambda logp, logp_ref, kind: kl_estimate(logp_ref, logp, kind)


def moving_reference(Loop): # `variants.Loop`, whose reference stands still
    "The KL is measured from the policy itself: the reference moves along."
    def moving(*args):
        trainer = Loop(*args)
        trainer.reference = trainer.policy.lm
        return trainer
    return moving


def behind_the_end(response_states): # `model.response_states`, which skips what is masked
    "States after the end of a response are computed as well."
    return lambda lm, tokens, mask, length, counts=None: response_states(lm, tokens, mask, length)


def over_padding(whiten): # `whitening.whiten`, over what counts alone
    "Mean and variance are taken over the padding too."
    return lambda x, mask, **kwargs: whiten(x, **kwargs)


def centred(whiten): # `whitening.whiten`, which keeps it with shift_mean=False
    "The mean of the rewards goes too."
    return lambda x, mask, shift_mean=True: whiten(x, mask)


def padded_mean(rl_loss): # `loop.rl_loss`, over the tokens of responses alone
    "The policy loss is the mean over all positions, those after the end of a response too."
    def padded(config, batch, *now):
        loss, stats = rl_loss(config, batch, *now)
        right, wrong = (rl_loss(config, replace(batch, returns=None, response_mask=m), *now[:4])
                        for m in (batch.response_mask, torch.ones_like(batch.response_mask)))
        return loss + wrong[0] - right[0], stats | wrong[1] | dict(entropy=stats["entropy"])
    return padded


@dataclass(frozen=True)
class Failure:
    "One thing that is done otherwise than by default."
    what: str
    number: str  # of the detail, G1 to P13; "" for one that is none of them
    options: dict = field(default_factory=dict)
    swaps: tuple = ()
    start: object = None      # start(`Start`) -> the one to train from; None = as it is
    new_reward: bool = False  # train the reward model anew, with these options and swaps
    base: str = "ppo"         # the intact training that it is compared with

    def changed(self):
        "The options, the functions that are swapped, or the start."
        names = [f"`{name}` = {v}" for name, v in self.options.items()]
        names += [f"`{name}` in {holder.__name__.split('.')[-1]}" for holder, name, _ in self.swaps]
        return ", ".join(names + ["what it starts from"] * bool(self.start))


FAILURES = {
    "prompt unseen": Failure("the reward model reads the response without its prompt", "G1",
                             swaps=((model.RewardModel, "score", scored_alone),),
                             new_reward=True),
    "padding is a token": Failure("padding is read like any token", "G2",
                                  swaps=((model, "hidden_states", padding_read),
                                         (prompts, "sample", padding_sampled))),
    "positions count padding": Failure("positions count the padding, in sampling and learning",
                                       "G3",
                                       swaps=((model, "position_ids", places),
                                              (sample, "position_ids", places))),
    "positions differ": Failure("positions count the padding in the update alone", "G3",
                                swaps=((loop, "Policy", places_in_update),)),
    "top five": Failure("tokens are sampled among the five likeliest", "G4",
                        swaps=((sample, "draw", likeliest),)),
    "constant rate": Failure("the policy's learning rate does not fall", "G5",
                             swaps=((loop, "learning_rate", constant),)),
    "one seed for two": Failure("two processes sample the same prompts and responses", "G6",
                                swaps=((loop.Loop, "prompts", twice),)),
    "score at the edge": Failure("the score is read at the last position, padding or not", "R1",
                                 swaps=((reward_model, "RewardModel", read_at_the_edge),),
                                 new_reward=True),
    "loud head": Failure("the reward model's head begins with standard deviation 1", "R2",
                         swaps=((reward_model, "RewardModel", loud),), new_reward=True),
    "scores as they come": Failure("the reward model's scores are not normalised", "R3",
                                   start=raw_scores),
    "scaled too early": Failure("the scores are normalised before the reward model is trained",
                                "R3", start=scaled_before_training),
    "two passes": Failure("the reward model sees its labels twice", "R4", dict(rm_epochs=2),
                          new_reward=True),
    "four passes": Failure("the reward model sees its labels four times", "R4", dict(rm_epochs=4),
                           new_reward=True),
    "pairs": Failure("the best response is compared with one other, not with three", "R4",
                     swaps=((reward_model, "best_of_n_loss", one_pair),), new_reward=True),
    "temperature forgotten": Failure("sampled at temperature 0.7, log-probabilities at 1", "P1",
                                     swaps=((model, "selective_log_softmax", temperature_forgotten),
                                            ), base="cooler"),
    "loud values": Failure("the value head begins with standard deviation 1", "P2",
                           swaps=((loop, "Policy", opinionated),)),
    "unfinished prompts": Failure("prompts end before their full stop", "P3",
                                  start=on_task(Unfinished)),
    "dropout": Failure("dropout of 0.1 in the update", "P4", swaps=((loop, "Policy", thinned),)),
    "no truncation": Failure("responses are scored and trained to their last token", "P5",
                             start=on_task(Untruncated)),
    "no penalty": Failure("a response without an end is not punished", "P5",
                          dict(overlong="keep")),
    "penalty of 10": Failure("a response without an end scores -10", "P5", dict(penalty=-10.0)),
    "discount 0.9": Failure("a reward counts a tenth less with each token", "P6", dict(gamma=0.9)),
    "one minibatch": Failure("one gradient step in a pass", "P7", dict(minibatches=1)),
    "sixteen minibatches": Failure("sixteen gradient steps in a pass", "P7", dict(minibatches=16)),
    "microbatches alike": Failure("four microbatches, weighed alike however many tokens they hold",
                                  "P7", dict(microbatches=4),
                                  swaps=((loop, "rl_loss", weighed_alike),)),
    "no KL": Failure("KL costs nothing", "P8", dict(kl_coef=0.0)),
    "KL reversed": Failure("the KL in the reward has the wrong sign", "P8",
                           swaps=((rollout, "token_rewards", reversed_reward),)),
    "k3 in the reward": Failure("the KL in the reward is estimated by k3", "P8",
                                swaps=((rollout, "token_rewards", k3_in_reward),)),
    "reference moves": Failure("the reference is the policy itself", "P8",
                               swaps=((variants, "Loop", moving_reference),)),
    "paid at the edge": Failure("the score lands on the last position, not on the last token", "P8",
                                swaps=((rollout, "token_rewards", paid_at_the_edge),)),
    "paid everywhere": Failure("every token gets the whole score", "P8",
                               swaps=((rollout, "token_rewards", paid_everywhere),)),
    "KL in the loss": Failure("the KL is a term of the loss, at the same price", "P8",
                              dict(kl_in_loss=True, kl_coef=0.1)),
    "rewards unwhitened": Failure("rewards as they come", "P9", dict(whiten_rewards=False)),
    "rewards centred": Failure("whitening takes the mean of the rewards too", "P9",
                               swaps=((rollout, "whiten", centred),)),
    "advantages unwhitened": Failure("advantages as they come", "P9",
                                     dict(whiten_advantages=False)),
    "whitened with padding": Failure("whitening counts the padding", "P9",
                                     swaps=((rollout, "whiten", over_padding),)),
    "values unclipped": Failure("the value loss is not clipped", "P10", dict(value_clip=0.0)),
    "fixed coefficient": Failure("the coefficient of the KL stays at 0.1", "P11",
                                 dict(kl_target=0.0)),
    "Adam of PyTorch": Failure("epsilon is added after the bias correction", "P12",
                               dict(adam="pytorch")),
    "mean over padding": Failure("the policy's loss counts the padding", "",
                                 swaps=((model, "response_states", behind_the_end),
                                        (loop, "rl_loss", padded_mean))),
    "no clip": Failure("ratio times advantage, not clipped", "",
                       swaps=((grpo, "clipped_surrogate", unclipped),)),
    "one epoch": Failure("one pass over each batch", "", dict(epochs=1)),
    "eight epochs": Failure("eight passes", "", dict(epochs=8)),
    "lambda 0": Failure("the value head alone is trusted", "", dict(lam=0.0)),
    "lambda 1": Failure("the rewards alone are trusted", "", dict(lam=1.0)),
    "rate x 5": Failure("five times the learning rate", "", dict(learning_rate=5e-3)),
    "long gradients": Failure("gradients of any length", "", dict(max_grad_norm=1e9)),
    "GRPO: k1 in the loss": Failure("GRPO's KL is k1, without the ratio", "",
                                    swaps=((loop, "policy_loss", k1_in_loss),), base="grpo"),
    "GRPO: k3 reversed": Failure("GRPO's k3 has the wrong sign inside", "",
                                 swaps=((grpo, "kl_estimate", reversed_estimate),), base="grpo"),
    "GRPO: no KL": Failure("GRPO's KL has no weight", "", dict(kl_coef=0.0), base="grpo"),
    "GRPO: unscaled": Failure("advantages are not divided by the group's standard deviation", "",
                              dict(group_scale="none"), base="grpo"),
    "GRPO: mean over padding": Failure("GRPO's loss counts what comes after the end", "",
                                       swaps=((model, "response_states", behind_the_end),
                                              (loop, "rl_loss", padded_mean)),
                                       base="grpo"),
}


def with_new_reward(start, config):
    "Ask the human again, and train a reward model on the labels."
    stage = RewardTraining(config, start.lm, start.task)
    while stage.iteration < stage.iterations: stage.iterate()
    return replace(start, reward_model=stage.model, norm=stage.norm)


def attempt(name, start):
    "One training with one thing changed, measured with everything intact; also the logged rows."
    failure = FAILURES.get(name) or Failure("", "", base=name)
    options, look = BASES[failure.base] | failure.options, start.trainer(**BASES[failure.base])
    rows, first, broke = [], None, None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start.config.seed)
        with swapped(*failure.swaps):
            if failure.new_reward:
                start = with_new_reward(start, replace(start.config, **options))
            trainer = (failure.start(start) if failure.start else start).trainer(**options)
        def is_worth(): return evaluate(look, trainer.policy.lm).true.mean() >= WORTH
        while trainer.iteration < trainer.iterations:
            try:
                with swapped(*failure.swaps): rows.append(trainer.iterate())
            except FloatingPointError:
                broke = trainer.iteration + 1
                break
            if first is None and trainer.iteration % LOOK == 0 and is_worth():
                first = trainer.iteration
        return measure(look, trainer.policy.lm) | dict(first=first, broke=broke), rows


@lru_cache(maxsize=1)
def started(seed): return prepare(ReviewsConfig(seed=seed, device="cpu", eval_responses=512))


def run(name, seed):
    "The row of a training, and a row of dials for each iteration."
    torch.set_num_threads(1)
    start = started(seed)
    if name == PRETRAINED: outcome, rows = measure(start.trainer(), start.lm), []
    else: outcome, rows = attempt(name, start)
    def mean(dial):
        x = [r[dial] for r in rows if r[dial] is not None]
        return sum(x) / len(x) if x else None
    numbers = [*(outcome.get(c) for c in OUTCOME), *map(mean, DIALS)]
    curve = [[name, seed, r["iteration"], *(text(r[d]) for d in DIALS)] for r in rows]
    return [name, seed, *map(text, numbers)], curve


def main():
    args = options(__doc__, RESULTS, 10, FAILURES)
    game = GAME if args.out == RESULTS else args.out
    write(game / "failures_list.csv", ("failure", "number", "what", "changed", "base"),
          [(n, f.number, f.what, f.changed(), f.base) for n, f in FAILURES.items()])
    paths = args.out / "failures.csv", game / "dials.csv"
    columns = COLUMNS, ("failure", "seed", "iteration", *DIALS)
    rows, dials = ([] if args.fresh else read(*x) for x in zip(paths, columns))
    done = {(r[0], int(r[1])) for r in rows}
    names = [PRETRAINED, *BASES, *FAILURES]
    chosen = [PRETRAINED, *BASES, *args.only]
    todo = [(name, seed) for seed in args.seeds for name in names
            if name in chosen and (name, seed) not in done]
    for row, curve in side_by_side(run, todo, args.jobs, lambda job: SECONDS):
        rows = sorted([*rows, row], key=lambda r: (int(r[1]), names.index(r[0])))
        if row[1] == 0 or row[0] in BASES and row[1] < FRESH:
            dials = sorted([*dials, *curve],
                           key=lambda r: (names.index(r[0]), int(r[1]), int(r[2])))
        for x in zip(paths, columns, (rows, dials)): write(*x)


if __name__ == "__main__": main()
