"""Your own task: prompts, rewards and models as people have them."""
import asyncio
import copy
import csv
import inspect
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import transformers
from language.parts import TINY, After, handmade, trainer, without_times
from language_models import WORDS, make

from rlhf_notes import DPO, RLHF, cli, register_variant
from rlhf_notes.formulas.advantage import group_advantage, rloo_advantage
from rlhf_notes.hub.load import check_model, end_tokens
from rlhf_notes.hub.prompts import Classifier, Prompts, read_prompts
from rlhf_notes.hub.rewards import called, reward_functions
from rlhf_notes.language.config import Variant
from rlhf_notes.language.loop import Loop, rate_by_size, with_weights
from rlhf_notes.language.machine import Scaled
from rlhf_notes.language.model import make_gpt2, no_dropout
from rlhf_notes.language.rollout import (
    ADVANTAGES,
    Responses,
    rollout_stats,
    sample_table,
    treat_overlong,
    weighted_sum,
    with_advantages,
)
from rlhf_notes.language.sampling import sample
from rlhf_notes.launch import new_training, old_training
from rlhf_notes.reviews.task import make_tokenizer
from rlhf_notes.training.runs import Run
from rlhf_notes.training.seeds import seeded_generator

SMALL = dict(
    max_new_tokens=4, batch=16, minibatches=2, device="cpu", learning_rate=1e-2, kl_coef=0.0)
CHAT = [dict(role="user", content="w5 w6")]


def tokenizer(template=None):
    "With a BOS before each text, as Llama's."
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    t = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="w0"))
    t.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    t.post_processor = processors.TemplateProcessing(single="w1 $A", special_tokens=[("w1", 1)])
    tok = transformers.PreTrainedTokenizerFast(tokenizer_object=t, bos_token="w1", eos_token="w2")
    tok.chat_template = template
    return tok


TEMPLATE = ("w1 {% for m in messages %}{{ m['content'] }} {% endfor %}{% if "
            "add_generation_prompt %}w7{% endif %}")


def own(kind="GPT2", prompts=("w3 w4", "w5"), reward=None, tok=None, seed=0, **options):
    torch.manual_seed(seed)
    return RLHF(make(kind), tok or tokenizer(), prompts=prompts, reward=reward,
                **SMALL | dict(iterations=2) | options)


def count(prompts, responses): return [r.split().count("w9") for r in responses]


def with_token(name):
    "A tokenizer with a token that the model has no row for."
    tok = tokenizer()
    tok.add_tokens([name])
    return tok

# --- Adam

BARE = dict(max_new_tokens=4, batch=16, minibatches=2, device="cpu", iterations=2)


def by_place(prompts, responses): return list(range(len(responses)))


def bare(**options):
    "A training on a model of one's own, with what it takes by itself."
    lm = make_gpt2("tiny", len(WORDS), n_layer=1, n_embd=128, n_head=2)
    return RLHF(lm, tokenizer(), ["w3 w4"], by_place, **BARE | options)


def test_a_model_of_ones_own_gets_pytorchs_adam_and_a_rate_by_its_size():
    t = bare()
    size = sum(p.numel() for p in t.policy.lm.parameters() if p.requires_grad)
    assert (t.config.adam, t.config.adam_eps) == ("pytorch", 1e-8)
    assert t.config.learning_rate == rate_by_size(size) < 1e-3
    t = t.loop
    before = t.optimizer.vector.detach().clone()
    batch = with_advantages(t.config, t.collect(t.policy.lm, *t.prompts()), t.kl.coef)
    t.step(with_weights(t.config, batch))
    moved = (t.optimizer.vector.detach() - before).abs()[t.optimizer.vector.grad != 0]
    assert t.optimizer.eps == 1e-8
    torch.testing.assert_close(
        moved.median(), torch.tensor(t.config.learning_rate), rtol=0.01, atol=0)


def test_what_is_named_is_taken(tmp_path):
    named = dict(adam="tensorflow", adam_eps=1e-5, learning_rate=2e-3)
    t = bare(**named)
    assert {name: getattr(t.config, name) for name in named} == named
    u = bare().learn()
    u.save(tmp_path / "policy")
    again = RLHF.load(tmp_path / "policy", prompts=["w3"], reward=count)
    assert again.config == u.config and isinstance(u.config.learning_rate, float)
    assert trainer().config.learning_rate == 1e-3 and TINY.adam == "tensorflow"  # the reviews


def test_a_policy_that_an_earlier_version_saved_is_loaded(tmp_path):
    bare(prompt_length=5).save(tmp_path)
    path = tmp_path / "rlhf.json"
    path.write_text(path.read_text().replace("prompt_length", "query_length"))
    (tmp_path / "checksums.json").unlink()  # which an earlier version did not write
    again = RLHF.load(tmp_path, prompts=["w3"], reward=count)
    assert again.config.prompt_length == 5 == again.task.prompt_length


def test_a_loaded_policy_compares_its_rewards_as_it_did(tmp_path):
    def size(prompts, responses): return [len(r) for r in responses]
    kind = dict(algo="grpo", group=4, reward_aggregation="normalise")
    own(reward=[count, size], **kind).save(tmp_path)
    again = RLHF.load(tmp_path, prompts=["w3 w4", "w5"], reward=[count, size])
    again.iterate()
    x, loop = again.rollout, again.loop
    expected, _ = ADVANTAGES["gdpo"](again.config, loop.advantages(), again.task.weights)
    assert torch.equal(loop.advantages().advantages, expected)
    plain, _ = ADVANTAGES["grpo"](again.config, loop.advantages(), again.task.weights)
    assert not torch.equal(plain, expected) and x.parts.shape[1] == 2


def test_an_adapter_takes_a_higher_rate_than_as_many_weights_of_a_model():
    pytest.importorskip("peft")
    for rank in (2, 8):
        t = bare(lora=rank)
        learned = sum(p.numel() for p in t.policy.lm.parameters() if p.requires_grad)
        assert t.config.learning_rate == rate_by_size(learned, True) > 5 * rate_by_size(learned)
    assert rate_by_size(2_442_240, True) == 1e-3  # rank 8 of SmolLM2-135M, whose best it is
    assert bare(lora=2, learning_rate=2e-4).config.learning_rate == 2e-4
    pairs = [dict(prompt="w3 w4", chosen="w5 .", rejected="w6 .")]
    lm = make_gpt2("tiny", len(WORDS), n_layer=1, n_embd=128, n_head=2)
    taught = DPO(lm, tokenizer(), pairs, lora=2, max_new_tokens=4)
    assert taught.config.learning_rate == rate_by_size(1, True) == 7e-3


def test_numbers_of_numpys_are_options():
    t = bare(max_new_tokens=np.int64(3), seed=np.int64(1), iterations=np.int32(2))
    assert t.config == bare(max_new_tokens=3, seed=1, iterations=2).config
    with pytest.raises(ValueError, match="max_new_tokens must be in"):
        bare(max_new_tokens=np.int8(0))


def test_the_rate_falls_with_the_size():
    sizes = 10 ** torch.arange(1, 12)
    rates = [rate_by_size(int(n)) for n in sizes]
    assert rates[:5] == [1e-3] * 5 and all(a > b for a, b in zip(rates[4:], rates[5:]))
    assert 5e-6 < rate_by_size(124_000_000) < 3e-5  # Ziegler et al. 2019: 1e-5
    assert 3e-7 < rate_by_size(7_000_000_000) < 3e-6
    assert trainer(replace(TINY, learning_rate=None)).config.learning_rate == 1e-3


# --- models

@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_the_callers_default_dtype_and_device_change_nothing(algo, tmp_path):
    def learned():
        lm = make_gpt2("tiny", len(WORDS), n_layer=1, n_embd=16, n_head=2)
        t = RLHF(lm, tokenizer(), prompts=["w3 w4", "w5"], reward=count, algo=algo, iterations=2,
                 **SMALL).learn()
        t.save(tmp_path)
        return without_times(t.rows), t.generate(["w3"]), RLHF.load(tmp_path).generate(["w3"])
    expected = learned()
    for dtype in (torch.float16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"): assert learned() == expected
            assert torch.get_default_dtype() == dtype
        finally: torch.set_default_dtype(torch.float32)


def test_a_large_reward_model_computes_on_all_threads(monkeypatch, tmp_path):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads, lm = [], make_gpt2("tiny", len(WORDS), n_layer=1, n_embd=4, n_head=2)
    small, large = (sum(p.numel() for p in m.parameters())
                    for m in (lm, classifier(tmp_path, kind="GPT2")))
    assert large > 2 * small
    monkeypatch.setattr("rlhf_notes.training.fit.SMALL", 2 * small)

    def zero(prompts, responses):
        threads.append(torch.get_num_threads())
        return [0.0] * len(prompts)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for reward in (zero, [zero, str(tmp_path)]):
            t = RLHF(lm, tokenizer(), prompts=["w3"], reward=reward, algo="ppo", iterations=2,
                     **SMALL)
            assert t.kl is t.loop.kl
            t.learn()
        assert threads == [1, 1, 2, 2]  # in both iterations
    finally: torch.set_num_threads(before)


def test_a_reward_of_ones_own_computes_in_its_own_precision():
    dtypes, one = set(), torch.ones(2, 2)

    def reward(prompts, responses):
        dtypes.add((one @ one).dtype)
        return count(prompts, responses)
    own(reward=reward, precision="bfloat16").learn()
    assert dtypes == {torch.float32}


def test_a_small_model_learns_and_generates_on_one_thread(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = []

    def reward(prompts, responses):
        threads.append(torch.get_num_threads())
        return count(prompts, responses)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        t = own("GPT2", reward=reward, iterations=1, batch=8).learn()
        decode = t.task.decode
        t.task.decode = lambda *args: (threads.append(torch.get_num_threads()), decode(*args))[1]
        t.generate(["w3"])
        assert len(threads) == 2 and {*threads} == {1} and torch.get_num_threads() == 2
    finally: torch.set_num_threads(before)


@pytest.mark.parametrize("kind, algo", [("GPT2", "ppo"), ("Llama", "grpo"), ("Qwen2", "rloo")])
def test_a_model_learns_and_loads_elsewhere_with_the_same_logits(kind, algo, tmp_path):
    t = own(kind, reward=count, algo=algo, iterations=20, batch=32).learn()
    assert t.rows[-1]["score"] > t.rows[0]["score"] + 1 and t.rows[-1]["unscored"] == 0
    t.save(tmp_path / "policy")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    tok = transformers.AutoTokenizer.from_pretrained(tmp_path / "policy")
    tokens, mask = t.task.encode(["w3 w4"])
    if kind != "Qwen2":  # for which AutoTokenizer makes a tokenizer of Qwen2's own kind
        assert tok("w3 w4")["input_ids"] == tokens[0].tolist() == [1, 3, 4]
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, t.policy.lm(tokens).logits)
    again = RLHF.load(tmp_path / "policy", ["w3"], count)
    assert again.generate(["w3 w4", "w5"]) == t.generate(["w3 w4", "w5"])


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_what_is_frozen_stays_and_the_rest_learns(algo):
    torch.manual_seed(0)
    lm = make("GPT2")
    lm.transformer.h[0].requires_grad_(False)
    t = RLHF(lm, tokenizer(), prompts=["w3"], reward=count, algo=algo, **SMALL, iterations=1)
    before = {n: p.clone() for n, p in t.policy.lm.named_parameters()}
    t.learn()
    moved = {n for n, p in t.policy.lm.named_parameters() if not torch.equal(p, before[n])}
    assert moved
    assert not any(n.startswith("transformer.h.0") for n in moved)
    assert any(n.startswith("transformer.h.1") for n in moved)


def test_a_model_frozen_whole_is_refused():
    t = trainer()
    with pytest.raises(
        ValueError,
        match="model must have weights to train, got 'GPT2LMHeadModel' with all of them frozen"):
        RLHF(t.reference.requires_grad_(False), t.task.tokenizer, ['about'], count, device="cpu")


def test_check_model_says_what_differs():
    lm = no_dropout(make("Llama"))
    class Scaled(type(lm)):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = 3 * out.logits
            return out
    lm.__class__ = Scaled
    with pytest.raises(
        ValueError,
        match="same logits as its head makes of its last hidden state, got 'x', whose differ by 6"):
        check_model(lm, "x")


# --- prompts

def test_padding_on_the_right_is_refused():
    lm, mask = no_dropout(make("GPT2")), torch.tensor([[True, True, False], [True] * 3])
    with pytest.raises(
        ValueError,
        match=r"mask must be True in its last column \(pad prompts on the left\), got 1 of 2 rows"):
        sample(lm, torch.ones(2, 3, dtype=torch.long), mask, torch.rand(2, 2))


def test_prompts_are_read_as_the_tokenizer_reads_them():
    t = own(prompts=["w3 w4", "w5"])
    assert t.task.tokens[t.task.mask].tolist() == [1, 3, 4, 1, 5]
    assert t.task.mask.tolist() == [[True] * 3, [False, True, True]]


def kinds_of_tokenizers():
    "As GPT-2's, as Llama's, as BERT's."
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    letters, alphabet = "abcdefghijklmnopqrstuvwxyz", sorted(pre_tokenizers.ByteLevel.alphabet())
    t = Tokenizer(models.BPE({c: i for i, c in enumerate(["<|end|>", *alphabet])}, []))
    t.pre_tokenizer, t.decoder = (pre_tokenizers.ByteLevel(add_prefix_space=False),
                                  decoders.ByteLevel())
    yield t, dict(bos_token="<|end|>", eos_token="<|end|>")
    t = Tokenizer(
        models.BPE({c: i
                    for i, c
                    in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)),
                                  "\u2581", *letters])}, [], byte_fallback=True, unk_token="<unk>"))
    t.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(),
                                   decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    yield t, dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    t = Tokenizer(
        models.WordPiece({c: i
                          for i, c
                          in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters,
                                        *(f"##{c}" for c in letters)])}, unk_token="[UNK]"))
    t.pre_tokenizer, t.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    t.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    yield t, dict(eos_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]")


@pytest.mark.parametrize("kind", range(3), ids=["bytes", "with BOS", "pieces"])
def test_any_kind_of_tokenizer_reads_as_it_does_alone(kind, tmp_path):
    "In training and after saving; a reward hears what it would say of the response."
    backend, special = list(kinds_of_tokenizers())[kind]
    alone, mine = (
        transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special) for _ in range(2))
    prompts, heard = ["tell me a story", "what", "a caf\u00e9"], []
    def reward(prompts, responses):
        heard.extend(responses)
        return [len(r) for r in responses]
    lm = make("Llama", vocab_size=len(alone) + 3, max_position_embeddings=64)
    t = RLHF(lm, mine, prompts=prompts, reward=reward, **SMALL, iterations=1).learn()
    expected = alone(prompts)["input_ids"]
    assert [row[m].tolist() for row, m in zip(t.task.tokens, t.task.mask)] == expected
    for said, row, m in zip(heard, t.rollout.responses, t.rollout.response_mask):
        if (row[m] < len(alone)).all():
            assert said == alone.decode(row[m], skip_special_tokens=True)
    t.save(tmp_path / "policy")
    assert transformers.AutoTokenizer.from_pretrained(
        tmp_path / "policy")(prompts)["input_ids"] == expected
    assert RLHF.load(tmp_path / "policy").generate(prompts) == t.generate(prompts)
    (tmp_path / "policy" / "rlhf.json").write_text("{")
    for path in (tmp_path / "policy", tmp_path / "nowhere"):
        with pytest.raises(
            ValueError,
            match=f"^path must be a directory that RLHF.save has written, got {path}: "):
            RLHF.load(path)


def test_chats_take_the_tokenizers_template_and_no_second_bos():
    def reward(prompts, responses):
        assert set(map(str, prompts)) == {str(CHAT)}
        return count(prompts, responses)
    t = own(prompts=[CHAT, CHAT], reward=reward, tok=tokenizer(TEMPLATE)).learn()
    assert t.task.tokens.tolist() == 2 * [[1, 5, 6, 7]] and len(t.generate([CHAT])) == 1
    with pytest.raises(
        ValueError,
        match="prompts must be strings for a tokenizer without a chat template, got chat messages"):
        own(prompts=[CHAT])


def test_prompts_from_a_file(tmp_path):
    rows = [dict(prompt="w3", n=1), dict(prompt="w4", n=2)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "p.txt").write_text("w3\n\nw4 w5\n")
    assert read_prompts(tmp_path / "p.jsonl") == rows == read_prompts(iter(rows))
    assert read_prompts(str(tmp_path / "p.txt")) == [dict(prompt="w3"), dict(prompt="w4 w5")]
    with pytest.raises(
        ValueError,
        match="prompts must be a .jsonl file or a text with a prompt on each line, got p.csv"):
        read_prompts("p.csv")
    (tmp_path / "windows.JSON").write_bytes(
        b'\xef\xbb\xbf{"prompt": "w3", ' b'"n": 1}\r\n\r\n{"prompt": ' b'"w4", "n": 2}\r\n')
    assert read_prompts(tmp_path / "windows.JSON") == rows


def test_prompts_from_a_json_array(tmp_path):
    rows = [dict(prompt="w3", n=1), dict(prompt="w4", n=2)]
    (tmp_path / "array.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "chat.jsonl").write_text(json.dumps(CHAT))
    assert read_prompts(tmp_path / "array.json") == rows
    assert read_prompts(tmp_path / "chat.jsonl") == [dict(prompt=CHAT)]  # one chat, on one line
    (tmp_path / "array.json").write_text('["w3", 5]')
    with pytest.raises(ValueError, match="got .* in item 1 of .*array.json"):
        read_prompts(tmp_path / "array.json")


@pytest.mark.parametrize("text, words", [
    ('"w3"\n"w4"\n{"prompt"\n', "prompts must be JSON, got line 3 of .*p.jsonl: "),
    ('"w3"\n\n5\n', "prompts must be strings, lists of messages .* got .* in line 3 of .*p.jsonl"),
    ('{"prompt": "w3", "n": 1}\n{"prompt": "w4"}',
     r"prompts must all have the columns \['prompt', 'n'\], got \['prompt'\] in line 2 of"),
    ("\n", "prompts must not be empty, got .*p.jsonl"),
])
def test_a_bad_file_is_refused_with_its_line(text, words, tmp_path):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(ValueError, match=words): read_prompts(tmp_path / "p.jsonl")


@pytest.mark.parametrize("call, words", [
    (lambda: own(prompts=["w3", dict(text="w4")]), r"prompts must be strings, .* in prompts\[1\]"),
    (lambda: own(prompts=[[dict(role="user")]]),
     r"lists of messages with role and content, .* in prompts\[0\]"),
    (lambda: own(prompts=["w3 w99"], tok=with_token("w99")),
     "^prompts must have tokens among the 37 of the model, got 'w99', number " "37$"),
    (lambda: own(tok=with_token("w99")).generate(["w99"]), "prompts must have tokens among the 37"),
    (lambda: own(eval_every=1), "^eval_prompts must be given with eval_every, .* got none$"),
    (lambda: own(sft_steps=9), "^sft_steps must be an option of OwnConfig"),
    (lambda: own(reward="of_mine.size"),
     r"a text with a dot, of_mine.size \(on the command line: of_mine:size\)$"),
    (lambda: own(reward=lambda p, r, word: r),
     r"^reward must take prompts, .* got the argument 'word' beside the " r"columns \[\]$"),
    (lambda: own(reward=lambda texts: texts),
     r"^reward must take prompts and responses, got a function of \(texts\)$"),
    (lambda: own(prompts=[dict(prompt="w3", responses=1)], reward=count),
     "^prompts must have no column responses"),
    (lambda: own(reward=lambda p, r: {i: 1.0 for i in range(len(r))}).learn(),
     "reward must return a list of numbers, .* got {0: 1.0.*a dict is no list"),
    (lambda: own(reward=lambda p, r: {float(i) for i in range(len(r))}).learn(),
     "a set is no list"),
    (lambda: own(reward=lambda p, r: sys.exit(0)).learn(),
     r"reward must return a list of numbers, .*SystemExit: 0"),
    (lambda: own(max_new_tokens=30),
     r"max_new_tokens must fit into the model's context of 32 tokens, got 3 " r"\+ 30"),
    (lambda: own(prompts=["w3 " * 40]),
     r"prompts must fit into the model's context of 32 tokens, got 41 \+ 4"),
    (lambda: own(prompt_length=40),
     r"prompt_length must fit into the model's context of 32 tokens, got 40 " r"\+ 4"),
    (lambda: own().generate(["w3 " * 40]),
     r"prompts must fit into the model's context of 32 tokens, got 41 \+ "),
    (lambda: own(max_new_tokens=0), "max_new_tokens must be in"),
    (lambda: own(prompts=["w3", CHAT], tok=tokenizer(TEMPLATE)),
     r"prompts must be all strings or all chats, got both in prompts\[1\]"),
    (lambda: own(prompts=dict(prompt=["w3"])),
     "prompts must be a list, a dataset or the path of a file, got {'prompt'"),
    (lambda: own(prompts=None),
     "prompts must be a list, a dataset or the path of a file, got None"),
    (lambda: own(prompts=[CHAT], tok=tokenizer("{{ raise_exception('no') }}")),
     "prompts must be chats that the tokenizer's template takes, got " "TemplateError: no"),
    (lambda: Prompts(make_tokenizer(), ["about the film", "about the new cook"], count, 4),
     "prompts must be texts that the tokenizer can read, got 'about the new "
     "cook' .*WordLevel error"),
    (lambda: own().generate("w3 w4"), "prompts must be a list or the path of a file, got w3 w4"),
    (lambda: own().generate([]), "prompts must not be empty, got none"),
    (lambda: own(prompts=[], reward=count).learn(),
     "prompts must not be empty, got none to learn from"),
    (lambda: own().learn(),
     r"reward must be a function to learn from, got none \(DPO learns from " r"pairs\)"),
    (lambda: own(reward=3),
     "reward must be a function or a reward model, or a list of those and of " "pairs .* got"),
    (lambda: own(reward=[count, (count, "much")]),
     "reward must be a function or a reward model, or a list"),
    (lambda: own(reward=[(count, torch.ones(2))]), "reward must be a function .* got .*tensor"),
    (lambda: own(reward=(count, math.nan)), "reward must be a function .*, got .*, nan"),
    (lambda: own(reward=lambda p, r: [1.0]).learn(),
     "reward must return a number for each of the 16 responses, got 1"),
    (lambda: own(reward=lambda p, r: ["1"] * len(r)).learn(),
     r"reward must return a list of numbers, .* got \['1'.*TypeError"),
    (lambda: own(reward=lambda p, r: [[1.0]] * len(r)).learn(),
     r"reward must return a list of numbers, .* got \[\[1.0"),
    (lambda: own(reward=lambda p, r: torch.ones(len(r), 2)).learn(),
     r"reward must return a list of numbers, .* got tensor\("),
    (lambda: own(reward=lambda p, r: ({}[x] for x in r)).learn(),
     r"reward must return a list of numbers, .* got <generator .*KeyError"),
    (lambda: own(reward=lambda p, r: [10**400] * len(r)).learn(),
     r"reward must return a list of numbers, .* got .*OverflowError"),
    (lambda: own(reward=lambda p, r: [-math.inf] * len(r)).learn(),
     r"reward must return finite numbers, .* got \[-inf"),
    (lambda: own(reward=lambda p, r: 1.0).learn(),
     "reward must return a list of numbers, .* got 1.0"),
    (lambda: own(reward=lambda p, r: {}["x"]).learn(),
     r"reward must return a list of numbers, .* got nothing \(KeyError: 'x', "
     r"line \d+ of .*test_own_task.py\)"),
])
def test_what_cannot_be_is_refused_by_name(call, words):
    with pytest.raises(ValueError, match=words): call()


def test_an_empty_prompt_is_refused():
    from language_models import tokenizer as plain
    with pytest.raises(ValueError, match="prompts must have tokens, got ''"):
        own(prompts=["w3", ""], tok=plain())


# --- ends

def test_several_tokens_end_a_response(tmp_path):
    t = own(max_new_tokens=8)
    assert t.task.stop_token == [0, 2]  # the tokenizer's, and the generation config's
    said = torch.tensor([[5, 2, 6, 0], [5, 6, 0, 2], [5, 6, 7, 8]])
    _, mask, has_end = t.task.truncate(said)
    assert mask.sum(1).tolist() == [2, 3, 4] and has_end.tolist() == [True, True, False]
    lm = make("GPT2")
    lm.generation_config.eos_token_id = [7, 9]
    t = RLHF(lm, tokenizer(), prompts=["w3"], reward=count, device="cpu")
    assert t.task.stop_token == [2, 7, 9]
    t.save(tmp_path / "policy")
    assert RLHF.load(tmp_path / "policy").task.stop_token == [2, 7, 9]
    t.task.stop_token = []
    assert not t.task.truncate(said)[2].any()
    lm.generation_config.eos_token_id, tok = None, tokenizer()
    tok.eos_token = None
    assert end_tokens(tok, lm) == []
    for wrong in "w2", {"a": 1}, 1.5:
        lm.generation_config.eos_token_id = wrong
        with pytest.raises(ValueError, match="^model must have whole numbers as generation_config"):
            end_tokens(tok, lm)


def test_options_of_prompts_and_responses_are_followed():
    t = own(reward=count, stop_after=2, prompt_length=5)
    assert t.task.tokens.shape == (2, 5) and t.loop.prompts()[0].shape == (16, 5)
    _, mask, has_end = t.task.truncate(torch.tensor([[2, 5, 2, 6], [5, 2, 6, 7], [5, 6, 7, 2]]))
    assert mask.sum(1).tolist() == [3, 4, 4] and has_end.tolist() == [True, False, True]
    with pytest.raises(
        ValueError,
        match="prompt_length must be 0 or at least 3, the tokens of the longest prompt, got 2"):
        own(prompt_length=2)


ENDS = torch.tensor([3, 7, 8, 8])


@pytest.mark.parametrize("overlong, scores, kept", [
    ("keep", [2, 2, 2, None], [3, 7, 8, 0]), ("replace", [2, 2, -5, None], [3, 7, 8, 0]),
    ("subtract", [2, 2, -3, None], [3, 7, 8, 0]), ("filter", [2, 2, 2, None], [3, 7, 0, 0]),
    ("soft", [2, 1.25, 1, None], [3, 7, 8, 0])])
def test_responses_without_an_end(overlong, scores, kept):
    price = dict(penalty=-5.0) if overlong in ("replace", "subtract") else {}
    c = replace(TINY, response_length=8, stop_after=0, overlong=overlong, **price)
    mask, has_end = torch.arange(8) < ENDS[:, None], torch.tensor([True, True, False, False])
    found, left = treat_overlong(c, torch.tensor([2.0, 2.0, 2.0, math.nan]), mask, has_end)
    assert found[:3].tolist() == scores[:3] and found[3].isnan()
    assert left.sum(1).tolist() == kept and not (left & ~mask).any()


def test_a_soft_punishment_has_room():
    with pytest.raises(
        ValueError, match="overlong_buffer must be at most response_length = 8, got 9"):
        replace(TINY, response_length=8, stop_after=0, overlong="soft", overlong_buffer=9)
    with pytest.raises(ValueError, match="overlong must be .*'filter'"): own(overlong="cut")


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_what_is_filtered_teaches_nothing_and_own_rewards_are_kept_by_default(algo):
    kept = own(reward=count, algo=algo, iterations=1)
    assert kept.config.overlong == "keep" and kept.learn().rows[0]["unscored"] == 0
    filtered = own(reward=count, algo=algo, iterations=1, overlong="filter")
    row = filtered.learn().rows[0]
    assert 0 < row["unscored"] < 16 and row["unscored"] == round(16 * (1 - row["valid"]))


# --- rewards

def answers(task, texts, rows):
    "What a model said, as a reward gets it."
    said, _ = task.encode(texts)
    said, mask, has_end = task.truncate(said)
    nothing = torch.zeros(said.shape)
    return Responses(said, nothing, nothing, said, said, mask, has_end, rows)


@pytest.mark.parametrize("half", [0.5, np.float32(0.5), torch.tensor(0.5)])
def test_rewards_add_up_and_none_is_no_score(half):
    def some(prompts, responses): return [None if "w5" in p else 2 for p in prompts]
    t = own(reward=[(count, half), (some, np.int64(1))])
    task = t.task
    rows = [dict(prompt="w3 w4"), dict(prompt="w5")]
    tokens, mask = task.encode(rows, task.prompt_length)
    parts = task.score(tokens, mask, answers(task, ["w9 w9"] * 2, rows))
    assert weighted_sum(parts, task.weights).tolist() == [3, 1]
    task.use(some)
    scores = task.score(tokens, mask, answers(task, ["w9 w9"] * 2, rows))[:, 0]
    assert scores[0] == 2 and scores[1].isnan()


def test_a_reward_may_be_async_where_a_loop_runs_already():
    async def one(response):
        await asyncio.sleep(0)
        return response.split().count("w9")
    async def reward(prompts, responses): return await asyncio.gather(*map(one, responses))
    async def in_a_notebook(): return own(reward=reward, iterations=1).learn()
    awaited, plain = asyncio.run(in_a_notebook()), own(reward=count, iterations=1).learn()
    assert awaited.rows[0]["score"] == plain.rows[0]["score"]
    async def kept(): return asyncio.get_running_loop()
    nothing = inspect.signature(kept).bind()
    assert called(kept, nothing, {}) is called(kept, nothing, {})  # whatever keeps a client
    async def wrong(prompts, responses): return {}["x"]
    with pytest.raises(ValueError, match="^reward must return a list .*KeyError: 'x', line"):
        own(reward=wrong).learn()


def test_gradient_checkpointing_computes_again_and_the_same():
    def learned(checkpointed):
        torch.manual_seed(0)
        lm, calls = make("Llama"), []
        if checkpointed:
            getattr(lm, "activation_checkpointing_enable", lm.gradient_checkpointing_enable)()
        for m in lm.modules():
            if again := vars(m).get("_gradient_checkpointing_func"):
                m._gradient_checkpointing_func = lambda *a, f=again: calls.append(0) or f(*a)
        t = RLHF(lm.train(), tokenizer(), prompts=["w3"], reward=count, **SMALL, iterations=2)
        return calls, torch.nn.utils.parameters_to_vector(t.learn().policy.parameters())
    (none, plain), (some, again) = learned(False), learned(True)
    assert len(some) > len(none) == 0
    torch.testing.assert_close(again, plain, atol=1e-5, rtol=1e-4)


def test_each_of_several_rewards_has_a_column():
    def short(prompts, responses):
        return [None if i % 2 else -len(r) for i, r in enumerate(responses)]
    t = own(reward=[(count, 2.0), short], iterations=1).learn()
    texts = [r["response"] for r in sample_table(t.task, t.rollout, 16)]
    row = t.rows[0]
    assert row["reward_1_count"] == pytest.approx(sum(x.split().count("w9") for x in texts) / 16)
    assert row["reward_2_short"] == pytest.approx(-sum(map(len, texts[::2])) / 8)
    assert not [name for name in own(reward=count, iterations=1).learn().rows[0]
                if name.startswith("reward")]


def test_prompts_may_be_a_dataset():
    datasets = pytest.importorskip("datasets")
    rows = [dict(prompt=p, word="w9") for p in ("w3 w4", "w5")]
    def reward(prompts, responses, word):
        return [r.split().count(w) for r, w in zip(responses, word)]
    ours, theirs = (own(prompts=prompts, reward=reward).learn()
                    for prompts in (rows, datasets.Dataset.from_list(rows)))
    for x, y in zip(ours.policy.parameters(), theirs.policy.parameters()): assert torch.equal(x, y)


def test_columns_may_be_arrays():
    rows = [dict(prompt="w3", n=torch.ones(2)), dict(prompt="w3", n=torch.ones(2))]
    own(prompts=rows, reward=lambda prompts, responses, n: [x.sum() for x in n]).learn()


def test_the_same_prompt_may_have_other_columns():
    "Each group of responses has the columns of the row that was sampled, be they long arrays."
    heard = []
    def reward(p, r, n):
        heard.append([int(x.argmax()) for x in n])
        return [0.0] * len(r)
    rows = [dict(prompt=p, n=torch.eye(2000)[i]) for i, p in enumerate(["w3", "w3", "w4", "w3"])]
    t = own(prompts=rows, reward=reward, batch=64)
    while t.iteration < 2:
        t.iterate()
        drawn = seeded_generator("rollout", t.config.seed, t.iteration - 1)
        at = torch.randint(4, (16,), generator=drawn)
        assert heard[-1] == at.repeat_interleave(4).tolist()
    assert set(heard[0]) == {0, 1, 2, 3}


def test_rewards_get_what_they_name():
    "Prompts and responses by either name, in any order; under other names, in turn."
    task = own(prompts=[dict(prompt="w3", n=1, m=2)], reward=count).task
    found = answers(task, ["w9 w9"], task.rows)
    class Module(torch.nn.Module):
        def forward(self, completions, prompts): return seen(prompts, completions)
    def seen(*given, **more):
        got.append((*given, more))
        return [1.0]
    p, r, ids = ["w3"], ["w9 w9"], [[1, 9, 9]]
    for reward, expected in (
        (lambda prompts, responses: seen(prompts, responses), (p, r, {})),
        (lambda completions, prompts: seen(prompts, completions), (p, r, {})),
        (Module(), (p, r, {})), (lambda a, b: seen(a, b), (p, r, {})),
        (lambda responses, x, n: seen(x, responses, n), (p, r, [1], {})),
        (lambda completions, **more: seen(completions, **more),
         (r, dict(prompts=p, completion_ids=ids, n=[1], m=[2]))),
        (lambda a, b, /, m, **more: seen(a, b, m, **more), (p, r, [2], dict(n=[1]))),
        (lambda prompts, m, **more: seen(prompts, m, **more),
         (p, [2], dict(responses=r, completions=r, completion_ids=ids, n=[1]))),
        (lambda *args, **more: seen(*args, **more), (p, r, dict(n=[1], m=[2]))),
        (lambda completions, scale=2, *, completion_ids, m=0: seen(scale, completion_ids, m),
         (2, ids, [2], {})),
    ):
        got = []
        task.use(reward)
        assert task.score(task.tokens, task.mask, found).tolist() == [[1]] and got == [expected]
    task.use(max)                                                       # has no signature
    with pytest.raises(ValueError, match="reward must return"):
        task.score(task.tokens, task.mask, found)


def test_prompts_may_be_a_dataframe(tmp_path):
    pandas = pytest.importorskip("pandas")
    rows = [dict(prompt="w3 w4", word="w9"), dict(prompt="w5", word="w8")]
    assert read_prompts(pandas.DataFrame(rows)) == rows
    assert read_prompts(pandas.Series(["w3", "w5"])) == [dict(prompt="w3"), dict(prompt="w5")]
    chats = pandas.DataFrame(dict(prompt=[CHAT, CHAT]))
    as_parquet_has_it = [pandas.array(x, dtype=object).to_numpy() for x in chats["prompt"]]
    chats["prompt"] = as_parquet_has_it
    assert read_prompts(chats) == [dict(prompt=CHAT), dict(prompt=CHAT)]
    def table(p, r): return pandas.DataFrame({i: [1.0] for i in range(len(r))})
    with pytest.raises(ValueError, match="a DataFrame is no list"): own(reward=table).learn()


def test_a_template_gets_tools_and_its_own_options():
    template = "{% if tools %}w8 {% endif %}{% if think is defined and not think %}w9 {% endif %}"
    off = dict(chat_template_kwargs=dict(think=False, other=None), tools=[dict(name="f")])
    def reward(prompts, responses, tools): return [len(t or []) for t in tools]
    rows = [dict(prompt=CHAT) | off, dict(prompt=CHAT, tools=None, chat_template_kwargs=None)]
    t = own(prompts=rows, reward=reward, tok=tokenizer(template + TEMPLATE), batch=64)
    asked = [row[m].tolist() for row, m in zip(t.task.tokens, t.task.mask)]
    assert asked == [[8, 9, 1, 5, 6, 7], [1, 5, 6, 7]] and len(t.generate(rows)) == 2
    assert 0 < t.learn().rows[0]["score"] < 1
    wrong = [dict(prompt=CHAT, chat_template_kwargs=3)]
    with pytest.raises(ValueError, match="^prompts must be chats that the tokenizer's template"):
        own(prompts=wrong, tok=tokenizer(TEMPLATE))


def classifier(path=None, template=None, labels=1, kind="Llama"):
    torch.manual_seed(0)
    lm = make(kind).base_model
    config = type(lm.config)(**lm.config.to_dict() | dict(num_labels=labels, pad_token_id=None))
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    if path is not None:
        model.save_pretrained(path)
        tokenizer(template).save_pretrained(path)
    return model


def by_hand(model, text):
    ids = text
    if isinstance(text, str): ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad(): return model(torch.tensor([ids])).logits[0, 0].item()


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_a_reward_model_scores_prompt_and_response_together(kind, tmp_path, monkeypatch):
    model = classifier(tmp_path / "rm", kind=kind)
    monkeypatch.setattr(Classifier, "BATCH", 3)
    f = Classifier(str(tmp_path / "rm"))
    texts = ["w3 w4 w9", "w5", "w6 w7", "w3 w4 w5 w6 w8"]
    torch.testing.assert_close(
        f(texts), torch.tensor([by_hand(model, f"w1 {t}") for t in texts]), rtol=1e-4, atol=1e-5)
    for reward in (tmp_path / "rm", [(str(tmp_path / "rm"), 2.0)], f.model):
        t = own(kind=kind, reward=reward, iterations=1)
        weight = 2.0 if isinstance(reward, list) else 1.0
        before = [p.clone() for p in t.task.rewards[0][0].model.parameters()]
        t.learn()
        x = t.rollout
        seen = torch.cat([x.mask[:, :-x.logp.shape[1]], x.response_mask], 1)
        for tokens, real, score in zip(x.tokens, seen, x.scores.tolist()):
            ids = tokens[real].tolist()
            ids = ids[:-1] if ids[-1] in t.task.stop_token else ids
            expected = weight * by_hand(model, ids)
            assert score == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert all(
            torch.equal(p, q) for p, q in zip(before, t.task.rewards[0][0].model.parameters()))


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen2", "Gemma2"])
@pytest.mark.parametrize("pad", [None, 0, 5])
def test_a_reward_model_is_read_at_its_last_token(kind, pad):
    "Whatever its tokenizer takes for padding, and if its texts end with that token."
    model, tok = classifier(kind=kind), tokenizer()
    model.config.pad_token_id, tok.pad_token = pad, "w2"
    texts = ["w3 w4 w2", "w2", "w6 w7 w8 w9 w2 w2", "w3"]
    expected = [by_hand(model, f"w1 {t}") for t in texts]
    torch.testing.assert_close(
        Classifier(model, tokenizer=tok)(texts), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert (model.config.pad_token_id, tok.pad_token, tok.padding_side) == (pad, "w2", "right")


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_a_reward_model_may_be_an_adapter(kind, tmp_path):
    peft = pytest.importorskip("peft")
    make(kind).save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "base", num_labels=1)
    for task in ("SEQ_CLS", None):
        lm = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(
            r=4, target_modules="all-linear", exclude_modules=["score"], task_type=task,
            init_lora_weights=False)).eval()
        lm.save_pretrained(tmp_path / "rm")
        tokenizer().save_pretrained(tmp_path / "rm")
        if task is None:
            with pytest.raises(ValueError, match="^reward must be an adapter that was saved with"):
                own(reward=str(tmp_path / "rm"))
            continue
        for reward in (str(tmp_path / "rm"), [(Classifier(lm, tokenizer=tokenizer()), 1.0)]):
            f = reward_functions(reward)[0][0]
            expected = [by_hand(lm, f"w1 {t}") for t in ("w3 w4", "w5")]
            assert f(["w3 w4", "w5"]).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
            own(reward=reward, iterations=1).learn()


class Judge(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.config = transformers.LlamaConfig(num_labels=1)

    def forward(self, prompts, responses): return [len(r) for r in responses]


def test_an_object_with_a_config_is_called():
    class Plain:
        config = dict(weight=1.0)
        def __call__(self, prompts, responses): return [len(r) for r in responses]
    for reward in (Judge(), Plain(), [(Judge(), 2.0), Plain()]):
        t = own(reward=reward, iterations=1).learn()
        lengths = [len(r["response"]) for r in sample_table(t.task, t.rollout, 16)]
        assert t.rows[0]["score"] == pytest.approx(
            sum(lengths) / 16 * (3 if isinstance(reward, list) else 1))


def test_a_reward_model_reads_chats_through_its_own_template(tmp_path):
    theirs = "w8 {% for m in messages %}{{ m['content'] }} {% endfor %}"
    model = classifier(tmp_path / "rm", theirs)
    t = own(
        prompts=[CHAT], reward=str(tmp_path / "rm"), tok=tokenizer(TEMPLATE), iterations=1).learn()
    for row in sample_table(t.task, t.rollout, 16):
        assert row["score"] == pytest.approx(
            by_hand(model, f"w8 w5 w6 {row['response']}"), rel=1e-4, abs=1e-5)


def test_a_reward_model_that_is_none_is_refused(tmp_path):
    classifier(tmp_path / "two", labels=2)
    with pytest.raises(
        ValueError, match="reward must be a model with one label, got .*two' with 2"):
        own(reward=tmp_path / "two")
    with pytest.raises(
        ValueError,
        match="reward must be a directory or a name on the hub with a sequence classifier"):
        own(reward=str(tmp_path / "none"))
    class Module(torch.nn.Module):
        def forward(self, prompts, responses): return count(prompts, responses)
    own(reward=Module(), iterations=1).learn()  # no model of transformers, but a function
    make("Llama").save_pretrained(tmp_path / "lm")
    tokenizer().save_pretrained(tmp_path / "lm")
    with pytest.raises(ValueError, match="reward must .*without 1 of them, score.weight"):
        own(reward=str(tmp_path / "lm"))
    classifier(tmp_path / "rm")
    with pytest.raises(
        ValueError, match="prompts must be strings for a tokenizer without a chat template"):
        own(prompts=[CHAT], reward=str(tmp_path / "rm"), tok=tokenizer(TEMPLATE)).learn()
    with pytest.raises(
        ValueError, match="reward must fit into the model's context of 32 tokens, got 41"):
        Classifier(tmp_path / "rm")(["w3 " * 40])
    f = Classifier(tmp_path / "rm")
    f.tokenizer.add_tokens(["w99"])
    with pytest.raises(ValueError, match="^reward must have tokens among the 37 .* got 'w99'"):
        f(["w3 w99"])


def test_a_table_of_samples():
    t = own(reward=count, iterations=1).learn()
    rows = sample_table(t.task, t.rollout, 8)
    assert len(rows) == 8 and {r["prompt"] for r in rows} <= {"w3 w4", "w5"}
    for r, i in zip(rows, range(0, 16, 2)):
        x = t.rollout[i:i + 1]
        assert r["score"] == r["response"].split().count("w9") == x.scores.item()
        assert r["length"] == x.response_mask.sum().item() >= len(r["response"].split())
        assert r["kl"] == pytest.approx(
            ((x.logp - x.logp_ref) * x.response_mask).sum().item(), abs=1e-6)


@pytest.mark.parametrize("algo", ["ppo", "grpo", "rloo"])
@pytest.mark.parametrize("variant", ["ppo", "grpo"])
def test_what_is_not_scored_counts_nowhere(algo, variant):
    "The update is that of the scored responses, whatever the others hold."
    if algo == "ppo" and variant != "ppo": pytest.skip("PPO has one loss")
    def step(garbage):
        seen = iter(range(10**6))
        def reward(prompts, responses):
            return [math.nan if i % 4 == 3 else len(r) for i, r in zip(seen, responses)]
        t = own(reward=reward, algo=algo, variant=variant, group=4, iterations=1, microbatches=2,
                kl_coef=0.1)
        before = t.loop.collect
        def collect(*args):
            r = before(*args)
            bad = ~r.is_scored
            assert bad.tolist() == [i % 4 == 3 for i in range(16)]
            for x in (r.scores, r.logp, r.logp_ref, r.values):
                if x is not None: x[bad] += garbage
            return r
        t.loop.collect = collect
        return t.learn()
    a, b = step(0.0), step(0.7)
    assert a.rows[0]["unscored"] == 4
    for x, y in zip(a.policy.parameters(), b.policy.parameters()): torch.testing.assert_close(x, y)
    for name in set(a.rows[0]) - {"tokens_per_second"}:
        assert a.rows[0][name] == pytest.approx(b.rows[0][name]), name


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("variant", get_args(Variant))
def test_a_batch_with_unscored_responses_teaches_what_the_others_teach(variant, microbatches):
    t = own(reward=count, variant=variant, group=4, kl_coef=0.3, microbatches=microbatches)
    loop = t.loop
    batch = with_advantages(t.config, loop.collect(t.policy.lm, *loop.prompts()), 0.3)
    batch.scores, batch.logp_ref = torch.arange(16.0) % 5, batch.logp_ref - 0.5
    unscored = torch.arange(16) % 4 == 3
    batch.response_mask = batch.response_mask & ~unscored[:, None]
    batch = with_advantages(t.config, batch, 0.3)
    machine = Scaled(t.config, torch.device("cpu"))
    loop = Loop(t.config, t.loop.reference, t.task, t.loop.reward, machine)
    loop.update = lambda: torch.zeros(())
    def gradient(batch, pieces):
        machine.pieces = pieces
        loop.step(with_weights(t.config, batch))
        return loop.optimizer.vector.grad.clone()
    found, scored = gradient(batch, microbatches), batch[~unscored]
    torch.testing.assert_close(found, gradient(scored, 1), rtol=1e-4, atol=1e-6)
    assert found.any()


def test_a_variant_of_ones_own_trains_as_the_same_one_of_ours_does(own_variant):
    register_variant(own_variant, lambda r, A, logp, mask, low, high:
                     torch.minimum(r * A, r.clamp(1 - low, 1 + high) * A), eps_high=0.28)
    ours, own_one = (own(reward=count, variant=v, group=4).learn() for v in ("dapo", own_variant))
    assert [r["policy_loss"] for r in own_one.rows] == pytest.approx(
        [r["policy_loss"] for r in ours.rows])
    for a, b in zip(ours.policy.parameters(), own_one.policy.parameters()):
        torch.testing.assert_close(a, b)


def test_means_and_groups_leave_them_out():
    x = handmade()
    x.response_mask[1] = False
    stats = rollout_stats(replace(x, scores=x.scores.where(x.is_scored, torch.tensor(math.nan))))
    assert stats["score"] == pytest.approx(x.scores[[0, 2, 3]].mean().item())
    assert stats["length"] == 2
    kl = ((x.logp - x.logp_ref) * x.response_mask).sum(1)
    assert stats["kl_k1"] == pytest.approx(kl[[0, 2, 3]].mean().item())
    for algo, formula in (("grpo", group_advantage), ("rloo", rloo_advantage)):
        got = with_advantages(replace(TINY, algo=algo, group=4), x, 0.0).advantages[:, 0]
        torch.testing.assert_close(got[[0, 2, 3]], formula(x.scores[None, [0, 2, 3]])[0])


# --- the command line

@pytest.fixture
def begin(tmp_path, monkeypatch):
    "A training by a function, or by a reward model, in a directory."
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path
     / "rewards_of_mine.py").write_text("def size(prompts, responses): return [len(r) for r "
                                        "in responses]")
    (tmp_path / "prompts.txt").write_text("w3 w4\nw5\n")
    own().save(tmp_path / "lm")
    options = dict(SMALL, model="lm", response_length=4, iterations=4, algo="grpo", eval_every=3)
    del options["max_new_tokens"]
    return (lambda out, reward="rewards_of_mine:size": new_training("rlhf", options, tmp_path / out,
                                                                    prompts="prompts.txt",
                                                                    reward=reward))


def table(path):
    with open(path, newline="") as f:
        return [{k: x for k, x in r.items() if k != "tokens_per_second"} for r in csv.DictReader(f)]


def test_a_run_by_an_own_reward_is_interrupted_and_continued(begin, tmp_path, monkeypatch, capsys):
    assert begin("whole")() == 0
    with monkeypatch.context() as m:
        m.setattr("rlhf_notes.training.fit.stop_on_interrupt", lambda *say: After(2))
        assert begin("cut")() == 130
    assert "continue with: rlhf-notes rlhf --resume cut --trust" in capsys.readouterr().out
    assert len(table(tmp_path / "cut" / "metrics.csv")) == 2
    reward = "rewards_of_mine:size"
    with pytest.raises(ValueError, match=f"reward must be {reward} again, or --trust"):
        old_training("rlhf", tmp_path / "cut", reward="theirs:size")
    assert old_training("rlhf", tmp_path / "cut", reward=reward)() == 0
    whole, cut = (tmp_path / x for x in ("whole", "cut"))
    for name in ("metrics.csv", "samples.csv"): assert table(whole / name) == table(cut / name)
    lms = [transformers.AutoModelForCausalLM.from_pretrained(x / "policy") for x in (whole, cut)]
    assert all(torch.equal(p, q) for p, q in zip(*(lm.parameters() for lm in lms)))
    for x in (whole, cut):
        found = json.loads((x / "summary.json").read_text())
        assert found["steps"] == 64
        assert not found["interrupted"]
        assert (x / "curve.svg").stat().st_size > 1000
        assert [r["iteration"] for r in Run.resume(x).rows] == [1, 2, 3, 4]
    samples = table(whole / "samples.csv")
    assert list(samples[0]) == ["iteration", "prompt", "response", "score", "length", "kl"]
    assert [r["iteration"] for r in samples[::8]] == ["1", "3", "4"]
    assert all(float(r["score"]) == len(r["response"]) for r in samples)


def test_a_run_by_a_reward_model(begin, tmp_path):
    classifier(tmp_path / "rm")
    assert begin("by-model", "rm")() == 0
    assert json.loads((tmp_path / "by-model" / "config.json").read_text())["reward"] == "rm"
    with pytest.raises(ValueError, match="reward must be a directory or a name on the hub"):
        begin("none", "nothing")
    (tmp_path / "leaves.py").write_text("raise SystemExit(7)")
    with pytest.raises(ValueError, match="reward must be MODULE:FUNCTION, got 'leaves:f': 7"):
        begin("none", "leaves:f")
    assert not (tmp_path / "none").exists()


def test_chats_on_the_command_line(begin, tmp_path, capsys):
    own(prompts=[CHAT], tok=tokenizer(TEMPLATE)).save("chat")
    assert cli.main(
        ["generate", "--model", "chat", "--chat", "--device", "cpu", "w5 w6", "w3"]) == 0
    said = capsys.readouterr().out
    again = RLHF("chat", max_new_tokens=16, device="cpu")
    chats = [CHAT, [dict(role="user", content="w3")]]
    assert said == "".join(f"{p} {x}\n" for p, x in zip(("w5 w6", "w3"), again.generate(chats)))
    assert cli.main(["generate", "--model", "lm", "--chat", "--device", "cpu", "w5"]) == 2
    assert ("--prompts must be strings for a tokenizer without a chat template"
            in capsys.readouterr().err)


# --- processes

PROCESSES = """
import sys, torch
sys.path.insert(0, "TESTS")
from language.test_own_task import own, ragged, tokenizer
from language.parts import Pretend
from language_models import make
from rlhf_notes import DPO, RLHF
from rlhf_notes.language.loop import Loop

sample = Loop.prompts
def share(self, again=0):
    "The rows of this process of the batch that one process alone would sample."
    m = self.machine
    mine, m.rank, m.processes = (m.rank, m.processes), 0, 1
    rows, (m.rank, m.processes) = sample(self, again), mine
    n = len(rows[0]) // m.processes
    return [x[m.rank * n:][:n] for x in rows]
Loop.prompts = share
found = {}
for algo, variant in (("ppo", "ppo"), ("grpo", "grpo"), ("rloo", "dapo")):
    t = own(reward=ragged, algo=algo, variant=variant, batch=32, microbatches=2, group=4,
            kl_coef=0.1, adam_eps=1e-5).learn()  # 1e-8 would make a step of a gradient of 1e-10
    assert t.loop.machine.processes == int(sys.argv[1])
    found[algo] = t.rows, [p.detach() for p in t.policy.parameters()]

class Halved(Loop):
    def loss(self, part, batch):
        loss, log = super().loss(part, batch)
        return loss / 2, log
RLHF.LOOP = Halved
t = own(reward=ragged, algo="grpo", batch=32, microbatches=2, group=4, kl_coef=0.1,
        adam_eps=1e-5).learn()
assert type(t.loop) is Halved
found["a loop of one's own"] = t.rows, [p.detach() for p in t.policy.parameters()]
torch.manual_seed(0)
choices = [dict(prompt=f"w{i} w{j}", chosen="w9 " * (1 + i % 3), rejected="w8 " * (1 + j % 2))
           for i in range(3, 7) for j in range(3, 7)]
t = DPO(make("Llama"), tokenizer(), choices, max_new_tokens=4, iterations=2, batch=16,
        minibatches=2, microbatches=2, learning_rate=1e-2, device="cpu").learn()
found["dpo"] = t.rows, [p.detach() for p in t.policy.parameters()]
if t.loop.machine.rank == 0: torch.save(found, sys.argv[2])
"""


def ragged(prompts, responses):
    return [None if len(r.split()) == 2 else r.count("1") for r in responses]


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("HYPOTHESIS_PROFILE") != "thorough", reason="part of make test-all")
def test_two_processes_make_the_update_of_one(tmp_path):
    "With responses of many lengths, some of them not scored, in microbatches."
    tests, script = Path(__file__).parent.parent, tmp_path / "processes.py"
    script.write_text(PROCESSES.replace("TESTS", str(tests)))
    env = {**os.environ, "PYTHONPATH": str(tests.parent), "OMP_NUM_THREADS": "1",
           "ACCELERATE_USE_CPU": "1"}
    for count, launch in (
        (1, []), (2, ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"])):
        argv = [sys.executable, *launch, script, str(count), tmp_path / f"{count}.pt"]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = (torch.load(tmp_path / f"{count}.pt", weights_only=True) for count in (1, 2))
    for algo in one:
        (rows, policy), (same, also) = one[algo], two[algo]
        assert algo == "dpo" or 0 < rows[0]["unscored"] < 32 and 1 < rows[0]["length"] < 4
        for x, y in zip(policy, also):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5, msg=lambda m: f"{algo}: {m}")
        for x, y in zip(rows, same):
            for name in set(x) - {"tokens_per_second"}:
                # in a group without spread the advantage is rounding, and so is its sign
                near = 0.05 if name == "clip_fraction" else 1e-5
                assert x[name] == y[name] or x[name] == pytest.approx(
                    y[name], rel=1e-3, abs=near), (algo, name)
