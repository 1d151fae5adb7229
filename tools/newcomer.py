"""The package as a stranger meets it: built, installed away from the project, and used.

    python tools/newcomer.py [--newest]

Builds wheel and sdist, and installs them in environments of their own: the wheel beside torch
alone, where a formula has to work; the wheel with all that it requires, where an agent and a
language model are trained and what they save is loaded by transformers; the sdist. Prints the
seconds and the size of each. With --newest the newest versions are installed instead of those of
constraints.txt.
"""
import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORMULA = """
import torch, sys
from rlhf_notes import gae
advantages, returns = gae(*torch.ones(3, 2, 1), *torch.zeros(2, 2, 1, dtype=torch.bool))
assert advantages.shape == returns.shape == (2, 1)
assert "(T, N)" in gae.__doc__ and "terminated or truncated" in gae.__doc__, gae.__doc__
assert not {"transformers", "gymnasium", "pydantic", "matplotlib"} & set(sys.modules)
"""
SCRIPT = '''"""Twenty lines that a type checker has to understand."""
import torch

from rlhf_notes import PPO, RLHF, fast, gae, masked_mean, whiten


def reward(prompts: list[str], responses: list[str], **columns: object) -> list[float]:
    return [float(len(set(response))) for response in responses]


agent = PPO("CartPole-v1", seed=0)
returns = agent.evaluate(episodes=2)
print(returns.mean())

x = torch.ones(2, 3)
with fast.off():
    print(masked_mean(x, x > 0), whiten(x).shape)
advantages, targets = gae(x, x, x, x > 2, x > 2, gamma=0.9)
print(advantages.sum() + targets.sum())
trainer: type[RLHF] = RLHF
'''
PIPELINE = """
import sys
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline
write = pipeline("text-generation", model=f"{sys.argv[1]}/policy")
prompt = "about the hotel ."
text = write(prompt)[0]["generated_text"]
assert text.startswith(prompt) and len(text) > len(prompt), text
score = AutoModelForSequenceClassification.from_pretrained(f"{sys.argv[1]}/reward_model")
tokenizer = AutoTokenizer.from_pretrained(f"{sys.argv[1]}/reward_model")
tokens = tokenizer("about the hotel . the bed was lovely .", return_tensors="pt")
assert score(**tokens).logits.shape == (1, 1)
print(text)
"""
TINY = "--sft-steps 50 --labels 256 --norm-samples 64 --iterations 2 --eval-responses 16".split()


ENV = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(*command, cwd=None):
    found = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=ENV, capture_output=True, text=True)
    if found.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{found.stdout[-4000:]}{found.stderr[-4000:]}")
    return found.stdout


class Environment:
    "A fresh virtual environment in `folder`; each installation is timed."
    def __init__(self, folder, options):
        venv.create(folder, with_pip=True)
        self.folder, self.options, self.bin = (folder, options,
                                               folder
                                               / ("Scripts" if sys.platform == "win32" else "bin"))

    def size(self):
        return sum(
            p.stat().st_size for p in self.folder.rglob("*") if p.is_file() and not p.is_symlink())

    def install(self, what, *requirements):
        start, size = time.perf_counter(), self.size()
        run(self.bin / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
            *self.options, *requirements)
        print(f"{what:40} {time.perf_counter() - start:6.0f} s "
              f"{(self.size() - size) / 2**20:7.0f} MiB", flush=True)

    def python(self, *arguments, cwd): return run(self.bin / "python", *arguments, cwd=cwd)


def newcomer(tmp, options):
    run(sys.executable, "-m", "build", "--outdir", tmp / "dist", ROOT)
    (wheel,), (sdist,) = (tmp / "dist").glob("*.whl"), (tmp / "dist").glob("*.tar.gz")
    for path in wheel, sdist: print(f"{path.name:40} {path.stat().st_size / 2**10:15.0f} KiB")
    away = tmp / "away"
    away.mkdir()

    alone = Environment(tmp / "alone", options)
    alone.install("torch and NumPy", "torch", "numpy")
    alone.install("the wheel alone", "--no-deps", wheel)
    alone.python("-c", FORMULA, cwd=away)
    alone.install("the sdist alone", "--no-deps", "--force-reinstall", sdist)
    alone.python("-c", FORMULA, cwd=away)

    whole = Environment(tmp / "whole", options)
    whole.install("the wheel and what it requires", wheel)
    run(whole.bin / "rlhf-notes", "cartpole", "--out", away / "cartpole", cwd=away)
    run(whole.bin / "rlhf-notes", "rlhf", "--out", away / "rlhf", *TINY, cwd=away)
    whole.python("-c", PIPELINE, away / "rlhf", cwd=away)
    whole.install("a type checker", "basedpyright")
    (away / "script.py").write_text(SCRIPT, encoding="utf-8")
    (away / "pyrightconfig.json").write_text('{"typeCheckingMode": "basic"}', encoding="utf-8")
    run(whole.bin / "basedpyright", "script.py", "--pythonpath", whole.bin / "python", cwd=away)
    whole.python("script.py", cwd=away)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--newest", action="store_true")
    options = [] if parser.parse_args().newest else ["--constraint", ROOT / "constraints.txt"]
    with tempfile.TemporaryDirectory() as tmp: newcomer(Path(tmp), options)
    print("a newcomer finds all of it")
