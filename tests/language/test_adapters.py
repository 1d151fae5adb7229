"""An adapter learns while its base stands still, is the reference without itself, and loads elsewhere."""
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import transformers

from language.parts import TINY
from language_models import WORDS, make, tiny, tokenizer
from rlhf_notes import RLHF
from rlhf_notes.language.hub import add_lora, load_model, save_model
from rlhf_notes.language.model import head_log_probs, response_states
from rlhf_notes.language.pipeline import make_world

peft = pytest.importorskip("peft")

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %} w7{% endif %}"
CHATS = [[dict(role="user", content=f"w{i} w5")] for i in range(4)]
SMALL = dict(max_new_tokens=4, batch=32, minibatches=2, device="cpu", learning_rate=3e-2, kl_coef=0.0, iterations=15)


def qwen2_tokenizer():
    "Of Qwen2's own kind: AutoTokenizer makes no other for its models."
    vocab = {c: i for i, c in enumerate(["<eos>", *"0123456789Ġw"])}
    return transformers.Qwen2Tokenizer(vocab=vocab, merges=[], unk_token=None, eos_token="<eos>", pad_token=None)


def base(kind, path, tok):
    "A model on disk, with a head large enough to be heard."
    torch.manual_seed(0)
    lm = make(kind, vocab_size=len(WORDS))
    with torch.no_grad(): lm.get_output_embeddings().weight.mul_(5)
    lm.save_pretrained(path)
    tok.save_pretrained(path)
    return transformers.AutoModelForCausalLM.from_pretrained(path)


def lora(lm, **options):
    torch.manual_seed(0)
    config = peft.LoraConfig(**dict(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") | options)
    return peft.get_peft_model(lm, config)


def short(prompts, responses): return [sum(len(w) == 2 for w in r.split()) for r in responses]
def fives(prompts, responses): return [r.count("5") for r in responses]


ELSEWHERE = """
import json, sys, torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer
found = {}
for path in sys.argv[1:]:
    for kind, name in ((AutoPeftModelForCausalLM, "adapter"), (AutoModelForCausalLM, "adapter"), (AutoModelForCausalLM, "merged")):
        lm, tok = kind.from_pretrained(f"{path}/{name}"), AutoTokenizer.from_pretrained(f"{path}/{name}")
        chat = [[dict(role="user", content=f"w{i} w5")] for i in range(4)]
        ids = [tok.apply_chat_template(c, add_generation_prompt=True, return_tensors="pt", return_dict=True) for c in chat]
        found.setdefault(path, []).append([lm.generate(**x, do_sample=False, max_new_tokens=4)[0].tolist() for x in ids])
print(json.dumps(found))
"""

def test_an_adapter_learns_and_gives_the_same_answers_elsewhere(tmp_path):
    expected = {}
    for kind, tok, reward, algo in (("Llama", tokenizer(), short, "grpo"), ("Qwen2", qwen2_tokenizer(), fives, "ppo")):
        path, tok.chat_template = tmp_path / kind, TEMPLATE
        lm = lora(base(kind, path / "base", tok))
        before = {n: p.clone() for n, p in lm.named_parameters()}
        t = RLHF(lm, tok, prompts=CHATS, reward=reward, algo=algo, **SMALL).learn()
        assert t.rows[-1]["score"] > t.rows[0]["score"] + 1 and abs(t.rows[0]["kl_k1"]) < 1e-5 < 1 < t.rows[-1]["kl_k1"]
        moved = {n for n, p in lm.named_parameters() if not torch.equal(p, before[n])}
        assert moved == {n for n in before if "lora_" in n} and t.policy.lm is t.reference is lm        # no copy
        t.save(path / "adapter")
        t.save(path / "merged", merge=True)
        assert not list((path / "adapter").glob("model*")) and sorted(p.name for p in path.iterdir()) == ["adapter", "base", "merged"]
        again = RLHF.load(path / "adapter", CHATS, reward)
        assert again.generate(CHATS) == t.generate(CHATS) != RLHF(str(path / "base"), **SMALL).generate(CHATS)
        assert again.learn().policy.lm.peft_config.keys() == {"default"}                                # and learns on
        texts = [tok.apply_chat_template(c, add_generation_prompt=True, return_tensors="pt", return_dict=True) for c in CHATS]
        expected[str(path)] = 3 * [[lm.generate(**x, do_sample=False, max_new_tokens=4)[0].tolist() for x in texts]]
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, *expected], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected


def test_the_reference_is_the_model_without_its_adapter(tmp_path):
    lm = lora(base("Llama", tmp_path, tokenizer()))
    t = RLHF(lm, tokenizer(), prompts=["w1 w2"], reward=short, **SMALL | dict(iterations=3)).learn()
    prompts, mask, u = t.sample_prompts()
    rollout = t.score(prompts, mask, t.respond(t.policy.lm, prompts, mask, u))
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        states = [response_states(x, rollout.tokens, rollout.mask, 4) for x in (plain, lm)]
        reference, policy = (head_log_probs(x, h, rollout.responses)[0] for x, h in zip((plain, lm), states))
    torch.testing.assert_close(rollout.logp_ref, reference)
    torch.testing.assert_close(rollout.logp, policy)
    assert (policy - reference).abs().max() > 0.1


def test_an_adapter_on_a_gpt2_leaves_the_fast_way(tmp_path):
    "Its matrices are not those that the quick code would read."
    lm, _ = load_model(lora(tiny(), target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False), tokenizer())
    save_model(tmp_path / "lm", lm, tokenizer(), merge=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "lm")
    tokens, mask = torch.arange(10).view(2, 5), torch.ones(2, 5, dtype=torch.bool)
    with torch.no_grad():
        logp, _ = head_log_probs(lm, response_states(lm, tokens, mask, 4), tokens[:, 1:])
        torch.testing.assert_close(logp, merged(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1))
    assert any("lora_" in n for n, _ in lm.named_parameters())                      # it has not been merged itself


def added(lm):
    lm.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    return lm


@pytest.mark.parametrize("change, words", [
    (lambda lm: lora(lm).requires_grad_(False), "have weights to train, got 'PeftModelForCausalLM' with all of them frozen"),
    (added, r"be a PeftModel if it has adapters \(peft.get_peft_model makes one\), got 'LlamaForCausalLM' with some"),
    (lambda lm: lora(lm).requires_grad_(), "train nothing beside its adapter, .* got 'PeftModelForCausalLM' with base_model.*weight"),
    (lambda lm: peft.get_peft_model(lm, peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")), "give the same logits as its head makes of its last hidden state"),
])
def test_what_is_no_adapter_of_its_own_is_refused(change, words):
    with pytest.raises(ValueError, match="model must " + words):
        load_model(change(make("Llama", num_key_value_heads=2)), tokenizer())


def test_an_adapter_is_refused_where_it_cannot_be(tmp_path, monkeypatch):
    lora(base("Llama", tmp_path / "base", tokenizer())).save_pretrained(tmp_path / "adapter")
    tokenizer().save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="model must be without an adapter for the reviews, got '.*adapter'"):
        make_world(replace(TINY, model=str(tmp_path / "adapter")), "cpu")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"model must be without an adapter where peft is missing \(pip install rlhf_notes\[peft\] brings it\), got '.*adapter'"):
        load_model(tmp_path / "adapter")
    load_model(tmp_path / "base")


@pytest.mark.parametrize("change, words", [
    (lambda d: (d / "adapter_config.json").write_text("{"), "got '.*adapter': "),
    (lambda d: (d / "adapter_model.safetensors").write_text("x"), "got '.*adapter': "),
    (lambda d: (d / "adapter_config.json").write_text((d / "adapter_config.json").read_text().replace("base\"", "gone\"")), "got '.*adapter': model must be a directory .*gone"),
])
def test_a_damaged_adapter_is_told_in_one_line(change, words, tmp_path, recwarn):
    lora(base("Llama", tmp_path / "base", tokenizer())).save_pretrained(tmp_path / "adapter")
    recwarn.clear()
    load_model(tmp_path / "adapter", tokenizer())
    assert not recwarn.list
    change(tmp_path / "adapter")
    with pytest.raises(ValueError, match="model must be a directory or a name on the hub with a LoRA adapter .*" + words) as e:
        load_model(tmp_path / "adapter", tokenizer())
    assert "\n" not in str(e.value)


def test_an_adapter_by_an_option(tmp_path):
    "From Python and from the command line; the weights come from the seed, and nothing else moves."
    base("Llama", tmp_path, tokenizer())
    state = torch.get_rng_state()
    t = RLHF(str(tmp_path), prompts=["w1 w2"], reward=short, lora=2, seed=5, **SMALL)
    again, other = (add_lora(load_model(tmp_path)[0], 2, seed) for seed in (5, 6))
    for a, b, same in ((t.policy.lm, again, True), (t.policy.lm, other, False)):
        assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters())) == same
    assert torch.equal(torch.get_rng_state(), state)
    learned = {n for n, p in t.policy.lm.named_parameters() if p.requires_grad}
    assert len(learned) == 2 * 2 * 7 and all("lora_" in n for n in learned)                     # A and B, layers, matrices
    t.save(tmp_path / "adapter")
    assert RLHF.load(tmp_path / "adapter").policy.lm.peft_config["default"].r == 2


def test_the_reviews_train_all_weights():
    with pytest.raises(ValueError, match="lora must be 0 for the reviews, got 4"): make_world(replace(TINY, lora=4), "cpu")
