"""A student half as wide as its teacher: taught on its own samples, or trained by GRPO.

    python benchmarks/distillation.py                        # ten seeds
    python benchmarks/distillation.py --first 100 --seeds 2  # the learning rates

Appends to nbs/studies/results/distillation.csv. Each seed has a pretrained model, a reward model
and a teacher of its own, PPO's policy; a pretrained student of half the width learns from that
teacher, or by GRPO from the reward model, with the same prompts and random numbers. A row for the
teacher, one for the pretrained student, and one for each way every ten rollouts of 128 responses:
proxy and true reward on held-out prompts, KL from the pretrained student and from the teacher in
nats a response. Seeds from 100 on try all learning rates. A run that was stopped goes on with the
first seed that is missing.
"""
from dataclasses import replace

from jobs import RESULTS, by_seed, options, text

from rlhf_notes.language.loop import Loop
from rlhf_notes.language.model import make_gpt2
from rlhf_notes.language.rollout import ADVANTAGES
from rlhf_notes.reviews.config import ReviewsConfig
from rlhf_notes.reviews.pipeline import evaluate
from rlhf_notes.reviews.pretraining import Pretraining
from rlhf_notes.studies.variants import prepare

COLUMNS = ("seed", "way", "learning_rate", "samples", "proxy", "true", "valid", "win", "kl",
           "kl_teacher")
EVERY = 10  # iterations from one row to the next
RATES, BEST = (5e-4, 1e-3, 2e-3), dict(grpo=2e-3, teacher=2e-3)


def finish(stage):
    while stage.iteration < stage.iterations:
        stage.iterate()
    return stage


def half_as_wide(start):
    "A pretrained student of the same depth, heads of the same size, and half as many of them."
    config = start.lm.config
    lm = make_gpt2("tiny", config.vocab_size, config.eos_token_id, start.config.seed, n_head=2,
                   n_embd=config.n_embd // 2)
    return finish(Pretraining(start.config, lm, start.task)).lm


def learner(start, way, rate, teacher):
    "A loop at its beginning, of a start with the student's model."
    loop = start.trainer(algo="grpo", learning_rate=rate)
    if way == "grpo": return loop
    loop = Loop(replace(loop.config, kl_coef=0.0), start.lm, start.task, loop.reward,
                advantages=ADVANTAGES["teacher"])
    loop.reference = teacher
    return loop


def looker(start, teacher):
    "The function that makes a row of a student."
    before, beside = start.trainer(), start.trainer()
    beside.reference = teacher
    first = evaluate(before, start.lm)

    def look(way, rate, samples, lm):
        found, near = evaluate(before, lm).worth(first), evaluate(beside, lm)
        found |= dict(seed=start.config.seed, way=way, learning_rate=rate, samples=samples,
                      kl_teacher=near.worth(near)["kl"])
        return [text(found[c]) for c in COLUMNS]
    return look


def study(seed):
    "Yield the rows of a seed."
    start = prepare(ReviewsConfig(seed=seed, device="cpu", eval_responses=512))
    taught = finish(start.trainer())
    found = evaluate(taught).worth(evaluate(taught, start.lm))
    found |= dict(seed=seed, way="the teacher", samples=taught.config.batch * taught.iterations)
    yield [text(found.get(c)) for c in COLUMNS]
    start, teacher = replace(start, lm=half_as_wide(start)), taught.policy.lm
    look = looker(start, teacher)
    yield look("pretrained", None, 0, start.lm)
    for way in BEST:
        for rate in RATES if seed >= 100 else (BEST[way],):
            loop = learner(start, way, rate, teacher)
            while loop.iteration < loop.iterations:
                loop.iterate()
                if loop.iteration % EVERY == 0:
                    yield look(way, rate, loop.config.batch * loop.iteration, loop.policy.lm)


def main():
    args = options(__doc__, RESULTS / "distillation.csv", 10)
    by_seed(study, args, COLUMNS)


if __name__ == "__main__": main()
