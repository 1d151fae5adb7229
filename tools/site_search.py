"""The search page of the site knows every page's prose, so that a result comes with its line (from
file://, too), and which lesson defines a term.
"""
import json
import re

import nbformat
from docutils import nodes
from notebooks import ROOT

TERM = re.compile(r"^\| ([^|$]+?) \|"
                  r".*\]\((?:\.\./rlhf_notes/)?([\w/]+)\.(?:ipynb|py)[^)]*\) \|$", re.M)


# What people ask for -> the page that is about it, or the beginning of its section's anchor; of
# several whose words are all in the query, the one with the most.
ABOUT = {
    "kl increase": "metrics#kl-k1", "kl bigger": "metrics#kl-k1", "kl grow": "metrics#kl-k1",
    "balance kl": "studies/variants#what-a-nat", "same response": "why#the-entropy",
    "gradient clipping": "metrics#grad-norm", "gradient clipping norm": "metrics#grad-norm",
    "explained variance": "metrics#explained-variance", "many step": "hub/real_model#while",
    "normalize reward": "formulas/reward#a-scale", "reward scale": "formulas/reward#a-scale",
    "batch size": "language/config", "minibatch size": "language/config",
    "num_envs": "control/config", "parallel environment": "control/config",
    "invalid action": "control/spaces", "action masking": "control/spaces",
    "process reward": "reviews/reward_model#outcome",
    "old log prob": "formulas/ratio", "replay buffer": "formulas/ratio#how-far",
    "off policy": "studies/staleness", "value reward model": "language/model#the-policy",
    "length increase": "formulas/grpo#a-question", "equal reward": "why#all-advantages",
    "monitor": "metrics", "metrics": "metrics", "log": "doctor", "doctor": "doctor",
    "multi gpu": "bridges/scale#where-our", "two gpus": "bridges/scale#where-our",
    "several gpus": "bridges/scale#where-our",
    "deepspeed": "bridges/scale", "fsdp": "bridges/scale", "large scale": "bridges/scale#where-our",
    "distributed": "bridges/scale", "cnn": "control/own_environment#a-picture",
    "convolution": "control/own_environment#a-picture",
    "images": "control/own_environment#a-picture",
    "pixels": "control/own_environment#a-picture", "dict observation": "control/spaces",
    "action mask": "control/spaces", "pass k": "studies/checkable#the-formula",
    "verifiable reward": "studies/checkable", "rlvr": "studies/checkable",
    "reward hacking": "studies/variants#goodhart", "goodhart": "studies/variants#goodhart",
    "overoptimisation": "studies/variants#goodhart",
    "overoptimization": "studies/variants#goodhart",
    "clip": "formulas/surrogate", "dual clip": "formulas/surrogate", "lora": "hub/load",
    "own model": "hub/load", "gradient checkpointing": "hub/load",
    "atari": "control/envs", "mujoco": "studies/papers",
    "cleanrl": "studies/papers", "own environment": "control/envs",
    "gymnasium": "control/envs", "own prompts": "hub/prompts",
    "own task": "hub/prompts", "turns": "hub/turns", "tools": "hub/turns",
    "environment reply": "hub/turns", "reward server": "hub/rewards", "async": "hub/rewards",
    "http": "hub/rewards", "resume": "training/runs", "checkpoint": "training/runs",
    "interrupted": "training/runs", "wandb": "training/runs", "save model": "hub/save",
    "verl": "bridges/verl", "trl": "bridges/trl", "entropy collapse": "why#the-entropy",
    "ratio always 1": "why#the-ratio", "clip ratio 0": "why#the-ratio",
    "negative kl": "why#my-kl", "learning rate lora": "why#lora", "which algorithm": "rlhf",
    "human feedback": "rlhf", "cheat sheet": "sheet", "exercises": "exercises/check",
    "command line": "cli", "gae": "formulas/advantage", "grpo": "formulas/grpo",
    "dpo": "language/dpo", "dpo ppo": "studies/preferences", "kl": "formulas/kl",
    "kl penalty": "formulas/kl", "token mean": "formulas/masking#from-token",
    "truncated": "formulas/advantage#two-ways", "seeds": "studies/seeds",
    "value function": "formulas/value", "value clipping": "formulas/value#where-impl",
    "k1": "formulas/kl#as-a-gradient",
    "normalise advantages": "formulas/whitening#how-many",
    "distillation": "formulas/distillation", "reward column": "hub/prompts",
    "load transformers": "hub/save", "own policy loss": "studies/own_variant",
    "several rewards": "formulas/advantage#several-rewards",
    "rewards several scales": "formulas/advantage#several-rewards", "stale": "studies/staleness",
    "divide std": "formulas/advantage#what-the-standard", "loss is 0": "why#grpo",
    "loss negative": "why#my-policy-loss",
    "advantages 0": "why#all-advantages", "frac_reward_zero_std": "why#all-advantages",
    "generations": "why#how-many", "num_generations": "why#how-many",
    "group size": "why#how-many", "accumulation": "why#accumulation", "vllm": "why#sampler",
    "beta 0": "why#k1", "evaluation down": "why#the-reward", "eos": "why#responses",
    "nothing learned": "why#nothing", "no end": "language/rollout",
    "cut off": "language/rollout#responses-without", "mdp": "start#thirty-lines",
    "markov": "start#thirty-lines", "trajectory": "start#thirty-lines",
    "return": "start#thirty-lines", "discount factor": "start#thirty-lines",
    "bandit": "start#a-question", "baseline": "start#a-baseline",
    "rollout": "control/rollout", "monte carlo": "formulas/advantage#the-formulas",
    "td": "formulas/advantage#the-formulas", "bootstrap": "formulas/advantage#two-ways",
    "temporal difference": "formulas/advantage#the-formulas", "critic": "formulas/value",
    "own variant": "studies/own_variant", "own loss": "studies/own_variant",
    "own loop": "bridges/own_loop", "ddp": "bridges/own_loop", "torch compile": "bridges/own_loop",
    "torch export": "bridges/own_loop#exported", "onnx": "control/export",
    "cs336": "course#stanford", "stanford": "course#stanford", "slides": "course", "book": "course",
    "curriculum": "studies/checkable#easy-prompts", "debug": "doctor", "diverge": "doctor",
    "nan": "formulas/ratio#the-trap", "ratio explode": "formulas/ratio#the-trap",
    "tanh": "control/policy#what-the-log", "squash action": "control/policy#what-the-log",
    "completion truncated": "why#responses", "max length": "why#responses",
    "grpo loss 0": "why#grpo", "loss start 0": "why#grpo", "from scratch": "ladder",
    "laboratory": "ladder#in-the-page", "without clip": "ladder#without-the-clip",
    "hyperparameter": "settings", "published setting": "settings", "r1": "settings",
    "dapo setting": "settings", "tulu": "settings", "gamma 1": "settings#why-is-gamma",
    "discount language": "settings#why-is-gamma", "gamma language": "settings#why-is-gamma",
    "share actor critic": "settings#one-network", "shared network": "settings#one-network",
    "critic cost": "settings#one-network", "credit turn": "formulas/credit",
    "turn mask credit": "hub/turns#the-mask",
    "greedy worse": "why#the-greedy", "deterministic worse": "why#the-greedy",
    "falls back": "why#it-was-solved", "collapse solved": "why#it-was-solved",
    "collapse after": "why#it-was-solved", "cap": "why#responses", "lora rate": "why#lora",
    "update reference": "settings#should-the", "reset reference": "settings#should-the",
    "dpo chosen": "language/dpo", "clip tanh": "control/policy#what-the-log",
    "top p": "studies/staleness", "autoreset": "control/envs", "value loss": "formulas/value",
    "value loss huge": "metrics#value-loss", "value loss large": "metrics#value-loss",
    "truncation": "formulas/advantage#two-ways", "ended": "language/rollout#responses-without",
    "truncation autoreset": "formulas/advantage#two-ways",
    "normalize advantages": "formulas/whitening#how-many",
    "policy gradient": "start#the-policy-gradient",
    "advantage": "formulas/advantage", "rlhf": "rlhf", "policy loss": "formulas/ppo",
    "dpo gradient": "formulas/preference#dpo-no",
    "custom policy loss": "bridges/scale", "custom loss": "bridges/scale",
    "reward model": "reviews/reward_model", "train reward model": "hub/reward_trainer",
    "temperature": "formulas/logprob#which-temp", "top p ratio": "formulas/logprob#the-tokens",
    "log prob": "formulas/logprob",
    "clip higher": "formulas/surrogate#one-clamp", "entropy clip higher": "why#the-entropy",
    "kl coefficient": "studies/variants#what-a-nat", "adaptive kl": "formulas/kl#what-a-nat",
    "kl explode": "metrics#kl-k1", "kl coefficient adaptive": "formulas/kl#what-a-nat",
    "grpo ppo": "rlhf#which-to-take", "grpo rloo": "rlhf#which-to-take",
    "not increasing": "doctor", "not learning": "doctor", "not improving": "doctor",
    "gpu memory": "hub/recipes#memory", "out memory": "hub/recipes#memory",
    "learning rate": "hub/recipes#which-learning",
    "reference model": "language/model#the-reference",
    "bradley terry": "formulas/preference", "importance sampling": "formulas/ratio",
    "entropy bonus": "formulas/logprob#entropy", "exploration": "formulas/logprob#entropy",
    "sft": "rlhf#the-story", "supervised fine tuning": "rlhf#the-story",
    "sparse reward": "why#all-advantages", "a2c": "ladder#gae", "actor critic": "ladder#gae",
    "q learning": "index#who-this", "sac": "index#who-this", "multi agent": "index#who-this",
    "lstm": "index#who-this", "recurrent": "index#who-this",
    "epochs": "ladder#use-each-batch", "length bias": "formulas/grpo#a-question",
    "forgetting": "formulas/kl#what-a-nat", "best of n": "studies/variants#the-yardstick",
    "rloo": "formulas/advantage#without", "trpo": "formulas/surrogate#a-question",
    "dapo": "formulas/grpo#the-family", "gspo": "formulas/grpo#the-family",
    "cispo": "formulas/grpo#the-family", "dr grpo": "formulas/grpo#the-family",
    "chat template": "hub/prompts", "continuous action": "control/policy#continuous-actions",
}


def prose(doctree):
    "[anchor, title, text] of each section of a page; its paragraphs, without their formulas."
    found = {}
    for p in doctree.findall(nodes.paragraph):
        section = p
        while not isinstance(section, (nodes.section, nodes.document)): section = section.parent
        words = [t.astext() for t in p.findall(nodes.Text)
                 if not isinstance(t.parent, (nodes.math, nodes.raw))]
        found.setdefault(section, []).append("".join(words))
    return [[(s.get("ids") or [""])[0], s.next_node(nodes.title).astext(),
             re.sub(r"\s+", " ", " ".join(texts))] for s, texts in found.items()]


def defines():
    "{term: the page that defines it}, from the page of words."
    cells = nbformat.read(ROOT / "nbs" / "words.ipynb", as_version=4).cells
    rows = [row for c in cells for row in TERM.findall(c.source)]
    return {name.strip("`").lower(): re.sub(r"(^|/)\d+_", r"\1", page) for names, page in rows
            for name in names.split(", ")}


def about(env):
    "[words, address, title] of the page or section about each of `ABOUT`."
    for words, to in ABOUT.items():
        page, _, start = to.partition("#")
        link = next(a for a in env.tocs[page].findall(nodes.reference)
                    if a["anchorname"].startswith(f"#{start}" if start else ""))
        yield [words, f"{page}.html{link['anchorname']}", link.astext()]


def context(app, pagename, templatename, context, doctree):
    if pagename != "search": return
    pages = {name: prose(app.env.get_doctree(name)) for name in app.env.found_docs}
    app.add_js_file(None,
                    body=f"const PROSE = {json.dumps(pages)}, DEFINES = "
                    f"{json.dumps(defines())}, ABOUT = {json.dumps([*about(app.env)])};"
                    .replace("</", "<\\/"))
    app.add_js_file("search.js")


def setup(app): app.connect("html-page-context", context)
