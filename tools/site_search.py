"""The search page of the site knows every page's prose, so that a result comes with its line (from
file://, too), and which lesson defines a term.
"""
import json
import re

import nbformat
from docutils import nodes
from notebooks import ROOT

TERM = re.compile(r"^\| ([^|$]+?) \|.*\]\(([\w/]+)\.ipynb[^)]*\) \|$", re.M)


# What people ask for -> the page that is about it; of several whose words are all in the query, the
# one with the most.
ABOUT = {
    "monitor": "metrics", "metrics": "metrics", "log": "doctor", "doctor": "doctor",
    "multi gpu": "bridges/scale", "two gpus": "bridges/scale", "deepspeed": "bridges/scale",
    "fsdp": "bridges/scale", "large scale": "bridges/scale", "distributed": "bridges/scale",
    "cnn": "control/spaces", "images": "control/spaces", "pixels": "control/spaces",
    "dict observation": "control/spaces", "action mask": "control/spaces",
    "pass k": "studies/checkable", "verifiable reward": "studies/checkable",
    "rlvr": "studies/checkable", "reward hacking": "studies/failures",
    "goodhart": "studies/variants", "overoptimisation": "studies/variants",
    "overoptimization": "studies/variants", "clip": "formulas/surrogate",
    "dual clip": "formulas/surrogate", "lora": "hub/load", "own model": "hub/load",
    "own environment": "control/envs", "gymnasium": "control/envs",
    "own prompts": "hub/prompts", "own task": "hub/prompts", "resume": "training/runs",
    "checkpoint": "training/runs", "interrupted": "training/runs", "wandb": "training/runs",
    "save model": "hub/save", "verl": "bridges/verl", "trl": "bridges/trl",
    "entropy collapse": "why", "ratio always 1": "why", "negative kl": "why",
    "learning rate lora": "why", "which algorithm": "rlhf", "human feedback": "rlhf",
    "cheat sheet": "sheet", "exercises": "exercises/check", "command line": "cli",
    "gae": "formulas/advantage", "grpo": "formulas/grpo", "dpo": "language/dpo",
    "kl": "formulas/kl", "kl penalty": "formulas/kl", "token mean": "formulas/masking",
    "truncated": "formulas/advantage", "seeds": "studies/seeds",
    "value function": "formulas/value", "reinforce": "start", "value clipping": "formulas/value",
    "k1": "formulas/kl", "normalise advantages": "formulas/whitening", "distillation":
    "formulas/distillation", "reward column": "hub/prompts", "load transformers": "hub/save",
    "own policy loss": "bridges/scale", "several rewards": "formulas/reward", "stale":
    "studies/staleness", "divide std": "formulas/grpo", "loss is 0": "why", "loss negative": "why",
    "frac_reward_zero_std": "why", "generations": "why", "accumulation": "why", "vllm": "why",
    "beta 0": "why", "evaluation down": "why", "eos": "why", "nothing learned": "why",
    "no end": "language/rollout", "cut off": "formulas/reward",
}


def prose(doctree):
    "The paragraphs of a page, without their formulas."
    texts = [[t.astext() for t in p.findall(nodes.Text)
              if not isinstance(t.parent, (nodes.math, nodes.raw))]
             for p in doctree.findall(nodes.paragraph)]
    return re.sub(r"\s+", " ", " ".join("".join(words) for words in texts))


def defines():
    "{term: the page that defines it}, from the page of words."
    cells = nbformat.read(ROOT / "nbs" / "words.ipynb", as_version=4).cells
    rows = [row for c in cells for row in TERM.findall(c.source)]
    return {name.strip("`").lower(): re.sub(r"(^|/)\d+_", r"\1", page) for names, page in rows
            for name in names.split(", ")}


def about(env):
    "The words of `ABOUT` with page and title."
    return [[words, page, env.titles[page].astext()] for words, page in ABOUT.items()]


def context(app, pagename, templatename, context, doctree):
    if pagename != "search": return
    pages = {name: prose(app.env.get_doctree(name)) for name in app.env.found_docs}
    app.add_js_file(None,
                    body=f"const PROSE = {json.dumps(pages)}, DEFINES = "
                    f"{json.dumps(defines())}, ABOUT = {json.dumps(about(app.env))};"
                    .replace("</", "<\\/"))
    app.add_js_file("search.js")


def setup(app): app.connect("html-page-context", context)
