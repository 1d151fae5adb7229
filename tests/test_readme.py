"""The README's examples run as they are written."""
import re
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from rlhf_notes.hub.save import save_model
from rlhf_notes.language.model import make_gpt2

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
WORDS = ["<eos>", *"1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 + = ?".split()]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path_factory.mktemp("readme") / "lm"
    save_model(path, make_gpt2("tiny", len(WORDS), n_layer=1, n_embd=16, n_head=2),
               transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>",
                                                    chat_template=TEMPLATE))
    return path


@pytest.mark.parametrize("name", ["PPO", "RLHF"])
def test_an_example_runs_as_it_is_written(name, language_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(
        rf"```python\n((?:import re\n)?from rlhf_notes import {name}\n.*?)```", README, re.S)
    names = {}
    exec(code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(language_model)), names)
    if name == "PPO":
        assert names["agent"].evaluate(episodes=20).mean() > 475
        assert (tmp_path / "pole.gif").stat().st_size > 10_000
    else:
        rows = names["rlhf"].rows
        assert len(rows) == 16 and max(row["score"] for row in rows) > 0
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "policy")


def test_it_is_short():
    assert len(README.splitlines()) <= 120


def test_links_are_absolute_and_lead_to_files():
    links = re.findall(r"\]\(([^)]+)\)", README)
    hosts = r"https://(raw\.githubusercontent\.com|github\.com)"
    ours = [re.sub(hosts + "/rlhf-notes/rlhf_notes/(blob/)?main/", "", x) for x in links]
    assert len(ours) > 40 and all(link.startswith("https://") for link in links)
    assert not [
        x for x in ours if not x.startswith("https://") and not (ROOT / x.split("#")[0]).exists()]
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README)
    assert pictures and all(p.startswith("https://raw.") for p in pictures)
