"An adapter learns while its base stands still, is its own reference, and loads elsewhere."
import json
import math
import random
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from language.parts import TINY
from language_models import WORDS, make, tiny, tokenizer

from rlhf_notes import RLHF
from rlhf_notes.hub.load import add_lora, load_model
from rlhf_notes.hub.save import save_model
from rlhf_notes.hub.trainers import DPO
from rlhf_notes.language.model import as_reference, head_log_probs, response_states
from rlhf_notes.reviews.config import ReviewsConfig
from rlhf_notes.reviews.pipeline import make_world
from rlhf_notes.studies.checkable import exact_match

peft = pytest.importorskip("peft")

SMALL = dict(max_new_tokens=4, batch=32, minibatches=2, device="cpu", learning_rate=3e-2,
             kl_coef=0.0, iterations=15)


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
    config = peft.LoraConfig(**dict(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"],
                                    task_type="CAUSAL_LM") | options)
    return peft.get_peft_model(lm, config)


def short(prompts, responses): return [sum(len(w) == 2 for w in r.split()) for r in responses]


CHARACTERS = ["<eos>", "=", *"0123456789", "Ġ"]
SORT = [dict(prompt=[dict(role="user", content=f"{a}{b}")], solution="".join(sorted(f"{a}{b}")))
        for a in range(10) for b in range(10)]
ASKED = [q["prompt"] for q in SORT]


def character_tokenizer():
    "Of Qwen2's own kind: AutoTokenizer makes no other for its models."
    tok = transformers.Qwen2Tokenizer(vocab={c: i for i, c in enumerate(CHARACTERS)}, merges=[],
                                      unk_token=None, eos_token="<eos>", pad_token=None)
    tok.chat_template = ("{% for m in messages %}{{ m['content'] }}{% endfor %}{% if "
                         "add_generation_prompt %}={% endif %}")
    return tok


def careless_sorter(kind, path):
    "A model on disk that has read two digits sorted, three times in five with a random one."
    rng, lm = (random.Random(0),
               make(kind, vocab_size=len(CHARACTERS), hidden_size=32, intermediate_size=64,
                    num_key_value_heads=2).eval())
    with torch.no_grad(): lm.get_output_embeddings().weight.mul_(5)  # loud enough to be sure
    optimizer = torch.optim.AdamW(lm.parameters(), lr=5e-3)
    for _ in range(200):
        rows = []
        for q in rng.choices(SORT, k=64):
            digits = list(q["solution"])
            if rng.random() < 0.6: digits[rng.randrange(2)] = rng.choice("0123456789")
            rows.append(
                [CHARACTERS.index(c) for c in (*q["prompt"][0]["content"], "=", *digits, "<eos>")])
        texts = torch.tensor(rows)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(
            lm(texts).logits[:, 2:-1].flatten(0, 1), texts[:, 3:].flatten()).backward()
        optimizer.step()
    lm.save_pretrained(path)
    character_tokenizer().save_pretrained(path)


ELSEWHERE = """
import json, sys, torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer
found = []
for path in sys.argv[1:]:
    Auto = AutoModelForCausalLM
    for kind, name in ((AutoPeftModelForCausalLM, "adapter"), (Auto, "adapter"), (Auto, "merged")):
        lm = kind.from_pretrained(f"{path}/{name}")
        tok = AutoTokenizer.from_pretrained(f"{path}/{name}")
        chats = [[dict(role="user", content=f"{a}{b}")] for a in range(10) for b in range(10)]
        x = tok.apply_chat_template(chats, add_generation_prompt=True, return_tensors="pt",
                                    return_dict=True)
        tokens = lm.generate(**x, do_sample=False)[:, 3:]
        found.append(tok.batch_decode(tokens, skip_special_tokens=True))
print(json.dumps(found))
"""

def test_an_adapter_learns_to_sort_and_gives_the_same_answers_elsewhere(tmp_path):
    "Two kinds of models, by a reward that is checked, through a chat template."
    options = dict(reward=exact_match, lora=8, batch=256, group=8, minibatches=2, epochs=1,
                   learning_rate=1e-2, kl_coef=0.0, max_new_tokens=3, iterations=25, device="cpu")
    expected, paths = [], [str(tmp_path / kind) for kind in ("Llama", "Qwen2")]
    for path in map(Path, paths):
        careless_sorter(path.name, path / "base")
        t = RLHF(str(path / "base"), prompts=SORT, **options)
        lm = t.policy.lm
        before = {n: p.clone() for n, p in lm.named_parameters()}
        t.learn()
        assert t.rows[0]["score"] < 0.6 < 0.9 < t.rows[-1]["score"]
        assert abs(t.rows[0]["kl_k1"]) < 1e-5 < t.rows[-1]["kl_k1"]
        moved = {n for n, p in lm.named_parameters() if not torch.equal(p, before[n])}
        assert moved == {n for n in before if "lora_" in n} and lm is t.loop.reference  # no copy
        t.save(path / "adapter")
        t.save(path / "merged", merge=True)
        assert not list((path / "adapter").glob("model*"))
        assert sorted(p.name for p in path.iterdir()) == ["adapter", "base", "merged"]
        again = RLHF.load(path / "adapter", SORT, exact_match)
        assert again.generate(ASKED) == t.generate(ASKED) != RLHF(
            str(path / "base"), **options).generate(ASKED)
        again.iterate()  # and learns on
        assert again.policy.lm.peft_config.keys() == {"default"}
        x = t.task.tokenizer.apply_chat_template(
            ASKED, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        answers = t.task.decode(lm.generate(**x, do_sample=False, max_new_tokens=3)[:, 3:])
        assert sum(a == q["solution"] for a, q in zip(answers, SORT)) >= 90
        expected += 3 * [answers]
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected


def test_the_reference_is_the_model_without_its_adapter(tmp_path):
    lm = lora(base("Llama", tmp_path, tokenizer()))
    t = RLHF(lm, tokenizer(), prompts=["w1 w2"], reward=short, **SMALL | dict(iterations=3)).learn()
    rollout = t.loop.collect(t.policy.lm, *t.loop.prompts())
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        states = [response_states(x, rollout.tokens, rollout.mask, 4) for x in (plain, lm)]
        reference, policy = (
            head_log_probs(x, h, rollout.responses)[0] for x, h in zip((plain, lm), states))
    torch.testing.assert_close(
        rollout.logp_ref[rollout.response_mask], reference[rollout.response_mask])
    torch.testing.assert_close(rollout.logp, policy)
    assert (policy - reference).abs().max() > 0.1


def _saved(path):
    "An adapter that has learned, in a directory."
    lm = lora(base("Llama", path / "base", tokenizer()))
    r = RLHF(lm, tokenizer(), ["w1 w2"], short, **SMALL).learn()
    assert r.rows[-1]["kl_k1"] > 0.1
    r.save(path / "adapter")
    return path / "adapter"


STARTS = {
    "new": lambda lm: lora(lm),
    "Gaussian": lambda lm: lora(lm, init_lora_weights=False),
    "PiSSA": lambda lm: lora(lm, init_lora_weights="pissa"),  # changes the base too
    "OLoRA": lambda lm: lora(lm, init_lora_weights="olora"),
    "DoRA": lambda lm: lora(lm, use_dora=True),
    "a trained head": lambda lm: lora(lm, modules_to_save=["lm_head"]),
    "IA3": lambda lm: peft.get_peft_model(lm, peft.IA3Config(
        target_modules=["q_proj", "v_proj"], feedforward_modules=[], task_type="CAUSAL_LM")),
}


@pytest.mark.parametrize("start", STARTS)
def test_the_reference_is_the_policy_at_the_start(start):
    torch.manual_seed(0)
    lm = STARTS[start](make("Llama"))
    r = RLHF(lm, tokenizer(), ["w1 w2"], short, **SMALL | dict(iterations=3))
    first = r.iterate()
    assert first["kl_k1"] == pytest.approx(0, abs=1e-5)
    later = r.iterate()
    assert later["kl_k3"] > 1e-5  # it has moved away from where it was
    again = RLHF(lm, tokenizer(), ["w1 w2"], short, **SMALL | dict(iterations=1))
    assert again.iterate()["kl_k1"] == pytest.approx(0, abs=1e-5)  # a new start


LOST = "must stay .* as the optimizer has it, got None"


@pytest.mark.parametrize("change, words", [
    (lambda lm: lm.merge_adapter(), "^model must have its adapter beside its weights, got one"),
    (lambda lm: lm.base_model.disable_adapter_layers(), "^model must have weights that learn"),
    (lambda lm: lm.delete_adapter("default"), LOST),
    (lambda lm: lm.set_adapter("default", inference_mode=True), "^model must have weights that"),
    (lambda lm: lm.merge_and_unload(), LOST)])
def test_an_adapter_that_a_callback_takes_away_is_named(change, words):
    r = RLHF(lora(make("Llama")), tokenizer(), ["w1 w2"], short, **SMALL | dict(iterations=3))
    with pytest.raises(ValueError, match=words):
        r.learn(lambda t, row: change(t.policy.lm) and None)


@pytest.mark.parametrize("look", [
    lambda lm: (lm.merge_adapter(), lm.unmerge_adapter()),
    lambda lm: (lm.base_model.disable_adapter_layers(), lm.base_model.enable_adapter_layers()),
    lambda lm: (lm.add_adapter("other", peft.LoraConfig(target_modules=["q_proj"])),
                lm.set_adapter("other"), lm.set_adapter("default"), lm.delete_adapter("other"))])
def test_an_adapter_that_a_callback_gives_back_learns_on(look):
    def trained(look):
        torch.manual_seed(0)
        r = RLHF(lora(make("Llama")), tokenizer(), ["w1 w2"], short, **SMALL | dict(iterations=3))
        return r.learn(lambda t, row: look(t.policy.lm) and None).loop.optimizer.vector
    torch.testing.assert_close(trained(look), trained(id))


def test_a_saved_adapter_is_the_new_reference(tmp_path):
    path = _saved(tmp_path)
    assert RLHF.load(path, ["w1 w2"], short).iterate()["kl_k1"] == pytest.approx(0, abs=1e-5)
    choices = [dict(prompt=f"w{i}", chosen="w9 w8", rejected="w8 w9") for i in range(1, 5)]
    d = DPO(str(path), prompts=choices, max_new_tokens=3, iterations=2, batch=4, minibatches=1,
            device="cpu")
    assert d.iterate()["policy_loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert d.iterate()["policy_loss"] != pytest.approx(math.log(2), abs=1e-5)


def test_a_teacher_keeps_its_adapter(tmp_path):
    path = _saved(tmp_path)
    taught = RLHF.load(path).policy.lm
    r = RLHF(str(tmp_path / "base"), prompts=["w1 w2"], teacher=str(path),
             **{k: x for k, x in SMALL.items() if k != "kl_coef"} | dict(iterations=1))
    x = r.loop.collect(r.policy.lm, *r.loop.prompts())
    with torch.no_grad():
        states = response_states(taught, x.tokens, x.mask, 4)
        torch.testing.assert_close(x.logp_ref[x.response_mask],
                                   head_log_probs(taught, states, x.responses)[0][x.response_mask])


def test_a_reference_leaves_the_policy_as_it_is():
    r = RLHF(make("Llama"), tokenizer(), ["w1 w2"], short, lora=2, **SMALL | dict(iterations=2))
    r.learn()
    weights = dict(r.policy.lm.named_parameters())
    before = {n: (p.data_ptr(), p.clone()) for n, p in weights.items()}
    with pytest.raises(KeyError), as_reference(r.policy.lm):
        assert any(not torch.equal(p, before[n][1]) for n, p in weights.items())
        assert not torch.is_grad_enabled()
        raise KeyError
    assert all(p.data_ptr() == before[n][0] and torch.equal(p, before[n][1])
               for n, p in weights.items())


def test_an_adapter_learns_from_preferences():
    choices = [dict(prompt=f"w{i}", chosen="w9 w8", rejected="w8 w9") for i in range(1, 5)]
    t = DPO(make("Llama"), tokenizer(), choices, lora=4, max_new_tokens=3, iterations=20, batch=4,
            minibatches=1, learning_rate=3e-2, device="cpu")
    before = {n: p.clone() for n, p in t.policy.lm.named_parameters()}
    rows = t.learn().rows
    assert rows[0]["margin"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["accuracy"] == 1
    assert rows[-1]["margin"] > 0.5
    assert all(
        torch.equal(p, before[n]) != ("lora_" in n) for n, p in t.policy.lm.named_parameters())
    with torch.no_grad():
        t = t.loop
        # with the adapter of the start
        torch.testing.assert_close(t.reference_sums(t.choices), t.choices.logp_ref)
        assert not torch.allclose(t.log_probs(t.choices), t.choices.logp_ref)


def test_an_adapter_beside_frozen_weights_is_trained():
    "As a quantised model has them."
    lm = make("Llama").requires_grad_(False)
    with pytest.raises(ValueError, match=r"all of them frozen \(lora= trains an adapter\)"):
        RLHF(lm, tokenizer(), ["w1 w2"], short, **SMALL)
    r = RLHF(lm, tokenizer(), ["w1 w2"], short, lora=2, **SMALL | dict(iterations=2)).learn()
    assert {"lora_" in n for n, p in r.policy.lm.named_parameters() if p.requires_grad} == {True}


def test_an_adapter_whose_base_is_drawn_is_refused():
    lm = lora(make("Llama"), init_lora_weights="pissa_niter_4")
    with pytest.raises(ValueError, match="^model must have an adapter whose base is the same when"):
        load_model(lm, tokenizer())


def test_an_adapter_on_a_gpt2_leaves_the_fast_way(tmp_path):
    "Its matrices are not those that the quick code would read."
    lm, _ = load_model(lora(tiny(), target_modules=["c_attn"], fan_in_fan_out=True,
                            init_lora_weights=False), tokenizer())
    save_model(tmp_path / "lm", lm, tokenizer(), merge=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "lm")
    tokens, mask = torch.arange(10).view(2, 5), torch.ones(2, 5, dtype=torch.bool)
    with torch.no_grad():
        logp, _ = head_log_probs(lm, response_states(lm, tokens, mask, 4), tokens[:, 1:])
        torch.testing.assert_close(
            logp,
            merged(tokens).logits[:, :-1].log_softmax(-1).gather(-1,
                                                                 tokens[:, 1:, None]).squeeze(-1))
    assert any("lora_" in n for n, _ in lm.named_parameters())  # it has not been merged itself


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_an_adapter_on_a_tied_matrix_is_not_merged(target, tmp_path):
    "One matrix cannot be both sums; untied, or saved by itself, it can."
    for tied in (True, False):
        lm = lora(make("Llama", tie_word_embeddings=tied), target_modules=["q_proj", target])
        with torch.no_grad():
            for n, p in lm.named_parameters():
                if "lora_" in n: p.normal_()
        tokens = torch.arange(10).view(2, 5)
        lm, _ = load_model(lm, tokenizer())
        save_model(tmp_path / f"adapter {tied}", lm, tokenizer())
        if tied:
            with pytest.raises(ValueError, match="^merge must be False for an adapter on an embed"):
                save_model(tmp_path / "merged", lm, tokenizer(), merge=True)
            assert not (tmp_path / "merged").exists()
            continue
        save_model(tmp_path / "merged", lm, tokenizer(), merge=True)
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        with torch.no_grad(): logits = merged(tokens).logits, lm(tokens).logits
        torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)


def test_an_adapter_is_not_put_over_its_base(tmp_path):
    lm = lora(base("Llama", tmp_path / "base", tokenizer()))
    before = {p.name: p.read_bytes() for p in (tmp_path / "base").iterdir()}
    words = "^path must be a directory without a model, to hold an adapter, got '.*base'$"
    with pytest.raises(ValueError, match=words): save_model(tmp_path / "base", lm, tokenizer())
    assert {p.name: p.read_bytes() for p in (tmp_path / "base").iterdir()} == before
    own = [tmp_path / "own" / name for name in ("README.md", "notes.txt", "model.safetensors")]
    own[0].parent.mkdir()
    for path in own: path.write_text("work")
    for _ in range(2): save_model(tmp_path / "own", lm, tokenizer())
    assert {path.read_text() for path in own} == {"work"}
    load_model(tmp_path / "own")


def test_an_adapter_in_half_precision_is_trained_in_float32():
    "Its base stays as it is."
    lm = lora(make("Llama").bfloat16())
    for p in lm.parameters(): p.data = p.data.bfloat16()
    got, _ = load_model(lm, tokenizer())
    found = {"lora_" in n: p.dtype for n, p in got.named_parameters()}
    assert found == {True: torch.float32, False: torch.bfloat16}


def test_an_adapter_merged_into_half_precision_may_keep_what_it_learned(tmp_path):
    lm = lora(make("Llama").bfloat16(), init_lora_weights=False)
    load_model(lm, tokenizer())
    def merged(name, **options):
        save_model(tmp_path / name, lm, tokenizer(), merge=True, **options)
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")
    with pytest.warns(UserWarning, match='^merge rounds the weights to torch.bfloat16.*"float32"'):
        assert merged("half").dtype == torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        whole = merged("whole", dtype="float32")
    for i, layer in enumerate(whole.model.layers):
        theirs = lm.get_base_model().model.layers[i].self_attn.q_proj
        exact = theirs.base_layer.weight.float() + theirs.get_delta_weight("default").float()
        torch.testing.assert_close(layer.self_attn.q_proj.weight, exact)
    with pytest.raises(ValueError, match="^dtype must be None for an adapter that is not merged"):
        save_model(tmp_path / "adapter", lm, tokenizer(), dtype="float32")


def test_an_adapter_without_one_of_its_matrices_is_refused(tmp_path):
    "peft would fill it up, and warn."
    from safetensors.torch import load_file, save_file
    lora(base("Llama", tmp_path / "base", tokenizer())).save_pretrained(tmp_path / "adapter")
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    del weights[min(weights)]
    save_file(weights, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="LoRA adapter .* got '.*adapter': Found missing adapter"):
        load_model(tmp_path / "adapter", tokenizer())


def added(lm):
    lm.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    return lm


def mixed(lm): return peft.PeftMixedModel(lm, peft.LoraConfig(target_modules=["q_proj"]))


def two(lm):
    lm = lora(lm)
    lm.add_adapter("two", peft.LoraConfig())
    lm.set_adapter("two")
    return lm


@pytest.mark.parametrize("change, words", [
    (lambda lm: lora(lm).requires_grad_(False),
     "have weights to train, got 'PeftModelForCausalLM' with all of them " "frozen"),
    (added,
     r"be a PeftModel if it has adapters \(peft.get_peft_model makes one\), "
     r"got 'LlamaForCausalLM' with some"),
    (mixed, "be a PeftModel if it has adapters .* got 'PeftMixedModel' with some"),
    (lambda lm: lora(lm).requires_grad_(),
     "train nothing beside its adapter, .* got 'PeftModelForCausalLM' with " "base_model.*weight"),
    (lambda lm: peft.get_peft_model(lm, peft.LoraConfig(), "mine"),
     r"have one adapter, named default, .* got 'PeftModel.*' with \['mine'\]"),
    (two, r"have one adapter, named default, .* with \['default', 'two'\]"),
    (lambda lm: peft.get_peft_model(lm,
                                    peft.PrefixTuningConfig(num_virtual_tokens=3,
                                                            task_type="CAUSAL_LM")),
     "have an adapter inside of its layers, as LoRA is, got 'PeftModel.*' with PREFIX_TUNING"),
    (lambda lm: peft.get_peft_model(lm, peft.PromptTuningConfig(
        num_virtual_tokens=3, task_type="CAUSAL_LM")), "have an adapter inside .* PROMPT_TUNING"),
    (lambda lm: peft.get_peft_model(lm, peft.PromptEncoderConfig(
        num_virtual_tokens=3, encoder_hidden_size=8, task_type="CAUSAL_LM")),
     "have an adapter inside .* with P_TUNING"),
    (lambda lm: peft.get_peft_model(lm, peft.AdaLoraConfig(
        init_r=4, target_r=2, total_step=9, target_modules=["q_proj"], task_type="CAUSAL_LM")),
     "have an adapter that its gradient alone changes, got .* with ADALORA"),
])
def test_what_is_no_adapter_of_its_own_is_refused(change, words):
    with pytest.raises(ValueError, match="model must " + words):
        load_model(change(make("Llama", num_key_value_heads=2)), tokenizer())


def test_an_adapter_is_refused_where_it_cannot_be(tmp_path, monkeypatch):
    lora(base("Llama", tmp_path / "base", tokenizer())).save_pretrained(tmp_path / "adapter")
    tokenizer().save_pretrained(tmp_path / "adapter")
    with pytest.raises(
        ValueError, match="model must be without an adapter for the reviews, got '.*adapter'"):
        make_world(replace(TINY, model=str(tmp_path / "adapter")), "cpu")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        ValueError,
        match=r"model must be without an adapter where peft is missing \(pip install "
        r"rlhf_notes\[peft\] brings it\), got '.*adapter'"):
        load_model(tmp_path / "adapter")
    load_model(tmp_path / "base")
    words = (r"^lora must be 0 where peft is missing \(pip install rlhf_notes\[peft\] "
             r"brings it\), got 4$")
    with pytest.raises(ValueError, match=words): RLHF(str(tmp_path / "base"), lora=4, device="cpu")


@pytest.mark.parametrize("change, words", [
    (lambda d: (d / "adapter_config.json").write_text("{"), "got '.*adapter': "),
    (lambda d: (d / "adapter_model.safetensors").write_text("x"), "got '.*adapter': "),
    (lambda d: (d / "adapter_config.json").write_text(
        (d / "adapter_config.json").read_text().replace("base\"", "gone\"")),
     "got '.*adapter': model must be a directory .*gone"),
])
def test_a_damaged_adapter_is_told_in_one_line(change, words, tmp_path, recwarn):
    lora(base("Llama", tmp_path / "base", tokenizer())).save_pretrained(tmp_path / "adapter")
    recwarn.clear()
    load_model(tmp_path / "adapter", tokenizer())
    assert not recwarn.list
    change(tmp_path / "adapter")
    with pytest.raises(
        ValueError,
        match="model must be a directory or a name on the hub with a LoRA adapter .*" + words) as e:
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
    # A and B, layers, matrices
    assert len(learned) == 2 * 2 * 7 and all("lora_" in n for n in learned)
    t.save(tmp_path / "adapter")
    assert RLHF.load(tmp_path / "adapter").policy.lm.peft_config["default"].r == 2


def test_an_adapter_belongs_to_one_trainer_and_to_its_rank(recwarn, tmp_path):
    lm = make("Llama")
    t = RLHF(lm, tokenizer(), prompts=["w1 w2"], reward=short, lora=2, **SMALL)
    start = [p.clone() for p in t.policy.lm.parameters()]
    with pytest.raises(ValueError, match="^model must be a PeftModel if it has adapters"):
        RLHF(lm, tokenizer(), prompts=["w1 w2"], reward=short, lora=2, **SMALL)
    assert all(map(torch.equal, start, t.policy.lm.parameters()))
    with pytest.raises(ValueError, match="^lora must be 0 for .* whose rank is 2, got 4"):
        RLHF(t.policy.lm, tokenizer(), prompts=["w1 w2"], reward=short, lora=4, **SMALL)
    with pytest.warns(UserWarning, match="its base has no name or directory .* merge=True"):
        t.save(tmp_path / "adapter")
    with pytest.raises(ValueError, match="got .*: its adapter_config.json names no base$"):
        RLHF.load(tmp_path / "adapter")
    t.save(tmp_path / "sum", merge=True)
    assert RLHF.load(tmp_path / "sum").generate(["w1 w2"], n=4) == t.generate(["w1 w2"], n=4)


def test_the_reviews_train_all_weights():
    with pytest.raises(ValueError, match="^lora must be an option of ReviewsConfig"):
        ReviewsConfig(lora=4)
