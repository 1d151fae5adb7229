"""Train the tiny GPT-2 on the reviews, and write it before and after RLHF for a page of the site.

    python tools/site_policy.py [--seed 0]

Writes docs/widgets/policy-data.js, in about a minute, and nbs/studies/results/policy_path.csv: KL
and true reward of the models between the two. A weight is a whole number of 16 bits times the scale
of its tensor; `read` gives back the weights that the page computes with.
"""
import argparse
import base64
import copy
import csv
import json

import torch
from notebooks import ROOT

from rlhf_notes.reviews import task
from rlhf_notes.reviews.config import ReviewsConfig
from rlhf_notes.reviews.pipeline import Training, evaluate

FILE = ROOT / "docs" / "widgets" / "policy-data.js"
PATH = ROOT / "nbs" / "studies" / "results" / "policy_path.csv"
RULES = ("NOUNS", "ADJECTIVES", "INTENSIFIERS", "CATEGORY", "FOLLOWS", "COSTS", "NEGATION", "LIMIT")


def pack(weight):
    "A tensor as its scale and the base64 of its 16-bit numbers."
    scale = weight.abs().max().item() / 32767
    numbers = (weight / scale).round().to(torch.int16).contiguous()
    return [scale, base64.b64encode(bytes(numbers.untyped_storage())).decode()]


def unpack(packed, shape):
    scale, numbers = packed
    numbers = torch.frombuffer(bytearray(base64.b64decode(numbers)), dtype=torch.int16)
    return (numbers.float() * scale).reshape(shape)


def read(path=FILE):
    "The file's content, and the state dicts of the two models."
    text = path.read_text(encoding="utf-8")
    data = json.loads(text[text.index("{"):text.rindex("}") + 1])
    models = [{name: unpack(t[at], t["shape"]) for name, t in data["tensors"].items()}
              for at in ("before", "after")]
    return data, *models


def trained(seed):
    "A training with all its stages behind it."
    training = Training(ReviewsConfig(seed=seed))
    while training.left: training.iterate()
    return training


def content(training):
    before, after = training.lm.state_dict(), training.stage.policy.lm.state_dict()
    names = [name for name in before if name != "lm_head.weight"]  # it is the embedding again
    tensors = {name: dict(shape=list(before[name].shape), before=pack(before[name]),
                          after=pack(after[name])) for name in names}
    c = training.config
    return dict(seed=c.seed, words=task.WORDS, heads=training.lm.config.n_head,
                stop_after=c.stop_after, length=c.response_length,
                prompts=task.review_prompts(held_out=True)[:24], domains=list(task.DOMAINS),
                rules={name: getattr(task, name) for name in RULES}, tensors=tensors)


def path(training):
    "(share of the way from before to after, KL of a response, true reward), over held-out prompts."
    _, before, after = read()
    lm, first = copy.deepcopy(training.lm), evaluate(training.stage, training.lm)
    for share in torch.arange(0, 1.55, 0.1).tolist():
        state = {name: w + share * (after[name] - w) for name, w in before.items()}
        lm.load_state_dict(state | {"lm_head.weight": state["transformer.wte.weight"]})
        found = evaluate(training.stage, lm).worth(first)
        yield f"{share:.1f}", f"{found['kl']:.4f}", f"{found['true']:.4f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    training = trained(seed)
    text = f"// Made by `python tools/site_policy.py --seed {seed}`.\nconst POLICY = "
    FILE.write_text(text + json.dumps(content(training)) + ";\n", encoding="utf-8")
    with open(PATH, "w", newline="", encoding="utf-8") as f:
        csv.writer(f, lineterminator="\n").writerows([("share", "kl", "true"), *path(training)])
    print(f"{FILE}: {FILE.stat().st_size / 1e6:.2f} MB")
