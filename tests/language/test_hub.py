"""Models are loaded and saved whole, or refused in one sentence."""
import copy
import json
import logging
import math
import signal
import subprocess
import sys
import threading
import warnings

import pytest
import torch
import torch.nn.utils.prune
import transformers
from language_models import KINDS, WORDS, make, rough, texts, tiny, tokenizer
from torch import nn

from rlhf_notes import RLHF, RewardTrainer, fast
from rlhf_notes.formulas.reward import RewardNorm
from rlhf_notes.hub import load as hub
from rlhf_notes.hub.load import check_model, load_model, pad_outside
from rlhf_notes.hub.save import save_model, save_reward_model
from rlhf_notes.language.model import RewardModel, hidden_states, no_dropout

def saved(lm, path, tok=None):
    lm.save_pretrained(path)
    if tok is not None:
        tok.save_pretrained(path)
    return str(path)


# --- loading

@pytest.mark.parametrize("kind", KINDS)
def test_any_model_that_was_saved_can_be_loaded(kind, tmp_path):
    lm = no_dropout(make(kind)).eval()
    got, tok = load_model(saved(make(kind), tmp_path, tokenizer()))
    tokens, mask = texts(5, 3, 7)
    with torch.no_grad():
        torch.testing.assert_close(hidden_states(got, tokens, mask)[mask],
                                   hidden_states(lm, tokens, mask)[mask], rtol=1e-4, atol=1e-4)
    assert tok.pad_token_id >= 37
    assert tok.padding_side == "left"
    assert next(got.parameters()).dtype == torch.float32
    assert tok(["w1 w2", "w3"], padding=True)["input_ids"] == [[1, 2], [tok.pad_token_id, 3]]


def test_a_model_may_be_a_module_or_a_path(tmp_path):
    lm = rough(tiny())
    got, tok = load_model(lm, tokenizer())
    assert got is lm and tok.pad_token_id == 37
    again, again_tokenizer = load_model(tmp_path / saved(lm, tmp_path, tokenizer()))
    assert all(torch.equal(a, b) for a, b in zip(lm.parameters(), again.parameters()))
    own = tokenizer(pad="mine")
    assert load_model(str(tmp_path), own)[1].pad_token == "mine"
    assert load_model(lm, tmp_path)[1].get_vocab() == again_tokenizer.get_vocab()


def test_loading_draws_nothing_from_a_common_source(tmp_path):
    path = saved(rough(tiny()), tmp_path, tokenizer())
    load_model(path)
    state = torch.get_rng_state()
    check_model(rough(tiny()))
    load_model(path)
    assert torch.equal(torch.get_rng_state(), state)


def test_transformers_is_silent_while_a_model_is_loaded(tmp_path):
    "Its report of what does not fit takes many lines, and what is wrong is said in one."
    records = []
    class Keep(logging.Handler):
        def emit(self, record): records.append(record.getMessage())
    logger, keep, level = (logging.getLogger("transformers"), Keep(),
                           transformers.utils.logging.get_verbosity())
    transformers.utils.logging.set_verbosity_warning()
    logger.addHandler(keep)
    try:
        for change, words in (
            (dict(vocab_size=50), "without 1 of them, transformer.wte.weight for one"),
            (dict(n_layer=3), "without 12 of them")):
            config = saved(tiny(), tmp_path, tokenizer()) and tiny().config
            for name, value in change.items(): setattr(config, name, value)
            config.save_pretrained(tmp_path)
            with pytest.raises(ValueError, match=words): load_model(str(tmp_path))
        assert not records and logger.level == logging.WARNING
    finally:
        logger.removeHandler(keep)
        transformers.utils.logging.set_verbosity(level)


def test_overlapping_trainings_leave_transformers_as_loud_as_it_was():
    "The first to be quiet may be the first to end."
    said = transformers.utils.logging
    before = said.get_verbosity(), said.is_progress_bar_enabled(), warnings.filters[:]
    inside, first_is_done = threading.Event(), threading.Event()
    def second():
        with hub.quiet_transformers():
            inside.set()
            first_is_done.wait(10)
    thread = threading.Thread(target=second)
    with hub.quiet_transformers():
        thread.start()
        assert inside.wait(10)
    assert said.get_verbosity() == logging.ERROR and not said.is_progress_bar_enabled()
    first_is_done.set()
    thread.join()
    assert (said.get_verbosity(), said.is_progress_bar_enabled(), warnings.filters[:]) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_trained_in_float32(dtype):
    "At this learning rate bfloat16 rounds 99 of 100 updates away."
    lm = make("Llama").to(dtype)
    t = RLHF(lm, tokenizer(), prompts=["w1"], reward=lambda p, r: [len(x) for x in r], batch=8,
             minibatches=1, iterations=3, max_new_tokens=4, learning_rate=1e-6, device="cpu")
    before = [p.detach().clone() for p in t.policy.lm.parameters()]
    t.learn()
    moved = [(p != b).float().mean() for p, b in zip(t.policy.lm.parameters(), before)]
    assert {p.dtype for p in t.policy.parameters()} == {torch.float32} and min(moved) > 0.5
    with pytest.raises(ValueError, match=f"must train weights in float32, got 'x' with {dtype}"):
        hub.check_trainable(make("Llama").to(dtype), "x")


# --- padding

@pytest.mark.parametrize(
    "words, pad, expected", [(37, None, 37), (37, "w0", 37), (37, "mine", 37), (30, None, 37),
                             (30, "w3", 37), (30, "mine", 37)])
def test_the_padding_token_is_outside_of_the_vocabulary(words, pad, expected):
    tok = pad_outside(tokenizer(WORDS[:words], pad), 37)
    assert tok.pad_token_id == expected and tok("w1 w29")["input_ids"] == [1, 29]
    assert (tok.pad_token == "mine") == (pad == "mine" and words == 37)


@pytest.mark.parametrize("words, pad, expected",
                         [(37, None, "w0"), (37, "w3", "w3"), (37, "mine", "w0"), (30, None, "w0"),
                          (30, "mine", "mine")])
def test_others_find_a_padding_token_that_the_model_knows(words, pad, expected, tmp_path):
    lm, tok = tiny(), pad_outside(tokenizer(WORDS[:words], pad), 37)
    before = tok.get_vocab(), tok.pad_token, tok.pad_token_id
    for _ in range(2):  # what was there is replaced
        save_model(tmp_path / "lm", lm, tok)
    assert (tok.get_vocab(), tok.pad_token, tok.pad_token_id) == before
    assert lm.config.pad_token_id is None
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "lm")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "lm")
    assert theirs.pad_token == expected and theirs.padding_side == "left"
    assert (theirs.pad_token_id == model.config.pad_token_id == model.generation_config.pad_token_id
            < 37)
    assert theirs(["w1 w2", "w3"], padding=True)["input_ids"] == [[1, 2], [theirs.pad_token_id, 3]]
    assert load_model(tmp_path / "lm")[1].pad_token_id >= 37
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lm"]


@pytest.mark.parametrize("kind", ["GPT2", "Gemma", "Falcon"])
def test_tied_weights_stay_tied_and_tokens_that_only_the_model_knows_stay(kind, tmp_path):
    t = RLHF(make(kind), tokenizer(WORDS[:30]), prompts=["w1"],
             reward=lambda prompts, responses: [len(r) for r in responses],
             max_new_tokens=4, batch=16, iterations=2, device="cpu", learning_rate=1e-2).learn()
    t.save(tmp_path / "lm")
    again, tok = load_model(tmp_path / "lm")
    head, words = again.get_output_embeddings().weight, again.get_input_embeddings().weight
    assert head is words
    assert torch.equal(head, t.policy.lm.get_input_embeddings().weight)
    assert not torch.equal(head, t.loop.reference.get_input_embeddings().weight)
    assert head.shape == (37, 16) and tok.pad_token_id >= 37


def test_a_pipeline_samples_as_the_training_did_and_stops_where_it_stopped(tmp_path):
    lm, ends = make("Llama"), [0, *range(20, 30)]
    lm.generation_config.eos_token_id = ends[1:]
    t = RLHF(lm, tokenizer(), prompts=["w1 w2"],
             reward=lambda prompts, responses: [0.0] * len(responses), max_new_tokens=9,
             temperature=0.5, batch=16, iterations=1, device="cpu")
    t.save(tmp_path / "lm")
    theirs = transformers.pipeline("text-generation", str(tmp_path / "lm"))
    config = theirs.model.generation_config
    assert (config.eos_token_id, config.max_new_tokens, config.temperature, config.top_k,
            config.do_sample) == (ends, 9, 0.5, 0, True)
    torch.manual_seed(0)
    texts = theirs(["w1 w2"] * 40, return_tensors=True)
    responses = [text[0]["generated_token_ids"][2:] for text in texts]
    first = [next((i for i, x in enumerate(r) if x in ends), None) for r in responses]
    assert {0, 1, 2} < set(first)
    assert all(
        len(r) == 9 if i is None else set(r[i + 1:]) <= {0} for r, i in zip(responses, first))


def test_what_was_sampled_from_is_what_is_saved(tmp_path):
    "Whatever the model came with, be it invalid."
    lm = tiny()
    theirs = dict(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05, min_p=0.1,
                  suppress_tokens=[3], no_repeat_ngram_size=2, do_sample=False)
    lm.generation_config.update(**theirs)
    save_model(tmp_path, lm, tokenizer(), temperature=0.9, max_new_tokens=5)
    assert lm.generation_config.top_p == 0.8 and lm.config.pad_token_id is None
    found = json.loads((tmp_path / "generation_config.json").read_text())
    expected = dict(temperature=0.9, top_k=0, max_new_tokens=5, do_sample=True, eos_token_id=[0])
    assert {k: found[k] for k in expected} == expected
    assert not {k for k in theirs.keys() - expected.keys() if found.get(k) is not None}


# --- where it is saved

def files(path): return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*.*")}


def test_other_files_of_the_directory_stay(tmp_path):
    for name in ("notes.txt", "README.md", "model_of_mine.safetensors", "deep/er.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("work")
    before = files(tmp_path)
    save_model(tmp_path, tiny(), tokenizer())
    save_reward_model(tmp_path / "deep", RewardModel(tiny()), RewardNorm(), load_model(tmp_path)[1])
    assert before.items() < files(tmp_path).items()
    assert (tmp_path / "deep" / "model.safetensors").exists() and load_model(tmp_path)


def test_an_earlier_model_leaves_nothing_that_is_read(tmp_path):
    tok = tokenizer()
    tok.chat_template = "{{ messages }}"
    save_model(tmp_path, rough(tiny()), tok)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    lm = rough(tiny(), 1)
    save_model(tmp_path, lm, tokenizer())
    again, tok = load_model(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(lm.parameters(), again.parameters()))
    assert tok.chat_template is None and not list(tmp_path.glob("*-of-*"))
    save_model(tmp_path, rough(tiny(), 2), tokenizer())
    again, _ = load_model(tmp_path)
    assert not torch.equal(lm.lm_head.weight, again.lm_head.weight)


@pytest.mark.parametrize("place, words", [
    (".", "with a name of its own, got '.'"), ("", "with a name of its own, got '.'"),
    ("file.txt", "and not a file, got 'file.txt'"),
    ("adapter", "without an adapter, to hold a whole model, got 'adapter'"),
    ("run", "without a config.json that is no model's, got 'run'")])
def test_places_where_no_model_can_be_saved(place, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("file.txt", "x"), ("adapter/adapter_config.json", "{}"),
                       ("run/config.json", '{"task": "rlhf"}')):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = files(tmp_path)
    with pytest.raises(ValueError, match=f"^path must be a directory {words}$"):
        RLHF(tiny(), tokenizer(), prompts=["w1"], max_new_tokens=2, device="cpu").save(place)
    assert files(tmp_path) == before


# --- the reward model of others

SCORES = """
import json, sys, torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast
found = {}
for path in sys.argv[1:]:
    lm = AutoModelForSequenceClassification.from_pretrained(path)
    tok = PreTrainedTokenizerFast.from_pretrained(path)
    texts = tok(["w1 w2 w3 w0", "w5", "w4 w0 w0"], padding=True, return_tensors="pt")
    with torch.no_grad(): scores = lm(**texts).logits
    c = lm.config
    found[path] = (scores.squeeze(1).tolist(), c.num_labels, c.reward_gain, c.reward_bias,
                   texts["attention_mask"].tolist())
print(json.dumps(found))
"""

def test_a_reward_model_gives_the_same_scores_elsewhere(tmp_path):
    """Where a text ends with the token that others pad with, and where the model knows more tokens
    than the tokenizer, too.
    """
    norm, expected = RewardNorm(2.0, 1.0), {}
    for kind in KINDS:
        lm, tok = load_model(make(kind), tokenizer(WORDS[:30]))
        tok.init_kwargs["padding_side"] = "left"  # as in the file of a saved policy
        before = copy.deepcopy((lm.config.to_dict(), tok.padding_side))
        model = RewardModel(lm, torch.Generator().manual_seed(0))
        with torch.no_grad(): model.head.bias.fill_(0.125)
        if kind in ("Cohere", "Granite", "FalconH1"):
            with pytest.warns(UserWarning, match="no reward model in .*Unrecognized"):
                save_reward_model(tmp_path / kind, model, norm, tok)
            continue
        left = torch.get_rng_state()
        save_reward_model(tmp_path / kind, model, norm, tok)
        assert torch.equal(torch.get_rng_state(), left)
        assert (lm.config.to_dict(), tok.padding_side) == before
        texts = tok(["w1 w2 w3 w0", "w5", "w4 w0 w0"], padding=True, return_tensors="pt")
        with torch.no_grad():
            expected[str(tmp_path / kind)] = model(
                texts["input_ids"], texts["attention_mask"].bool())
    done = subprocess.run([sys.executable, "-c", SCORES, *expected], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for path, (scores, labels, gain, bias, mask) in json.loads(done.stdout).items():
        torch.testing.assert_close(torch.tensor(scores) + 0.125, expected[path])
        torch.testing.assert_close(gain * torch.tensor(scores) + bias, norm(expected[path]))
        assert labels == 1 and mask == [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]]


# --- what cannot be

SEES_AHEAD = dict(
    vocab_size=37, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=32, sliding_window=32)


def refused(lm, what):
    with pytest.raises(ValueError, match=f"model must .*{what}"):
        check_model(lm, "x")


def test_check_model_refuses_what_is_not_as_it_should_be():
    refused(make("GPT2", resid_pdrop=0.5), "the same logits each time .is there dropout")
    lm = no_dropout(make("GPT2"))
    check_model(lm)
    lm.config.logit_scale = 3.0  # it says so, and does not do it
    with fast.off():
        refused(lm, "as its head makes of its last hidden state")
    lm = no_dropout(make("GPT2"))
    forward = type(lm.transformer).forward
    class Deaf(type(lm.transformer)):
        def forward(self, *a, position_ids=None, **k):  # hears of no positions
            return forward(self, *a, **k)
    lm.transformer.__class__ = Deaf
    refused(lm, "with padding on the left")
    lm = rough(tiny())
    with torch.no_grad():
        lm.transformer.ln_f.weight[0] = math.nan
    refused(lm, "its logits are not all finite")


def test_a_model_that_looks_ahead_or_forgets_is_refused():
    "Padding changes nothing for it, and yet it cannot be sampled from token by token."
    def gemma(**changes):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = transformers.Gemma3TextConfig(**SEES_AHEAD | changes)
            return rough(no_dropout(transformers.Gemma3ForCausalLM(config)))
    refused(gemma(use_bidirectional_attention=True), "token by token")
    lm = gemma()
    check_model(lm)
    class Forgetful(type(lm.base_model)):
        def forward(self, input_ids, past_key_values=None, **k):
            if past_key_values is not None:
                input_ids = (input_ids + 1) % 37  # with a cache it reads something else
            return super().forward(input_ids=input_ids, past_key_values=past_key_values, **k)
    lm.base_model.__class__ = Forgetful
    refused(lm, "token by token")


@pytest.mark.parametrize("call, words", [
    (lambda d: load_model(str(d / "nothing")),
     "model must be a directory or a name on the hub .* got '.*nothing'"),
    (lambda d: load_model(""), "got ''"),
    (lambda d: load_model(saved(tiny(), d)),
     "model must have a tokenizer of its own|with a tokenizer that " "transformers can load"),
    (lambda d: load_model(tiny(), str(d / "nothing")),
     "^tokenizer must be a directory or a name on the hub .* got '.*nothing'"),
    (lambda d: load_model(tiny()),
     "tokenizer must come with a model that is a module, got None for " "GPT2LMHeadModel"),
    (lambda d: load_model(tiny().requires_grad_(False), tokenizer()),
     "must have weights to train, got 'GPT2LMHeadModel' with all of them " "frozen"),
    (lambda d: load_model(saved(tiny(), d, tokenizer([f"w{i}" for i in range(50)]))),
     "must have a tokenizer of its own, got one with tokens up to 49 for a "
     "model with 37 tokens"),
    (lambda d: ((d / "config.json").write_text("{"), load_model(str(d))), "config.json"),
    (lambda d: ((d / "config.json").write_text('{"model_type": "nonsense"}'), load_model(str(d))),
     "nonsense"),
    (lambda d: (tiny().config.save_pretrained(d), tokenizer().save_pretrained(d),
                load_model(str(d))), "no file named"),
    (lambda d: (saved(tiny(), d, tokenizer()), tiny(n_layer=3).config.save_pretrained(d),
                load_model(str(d))),
     r"must come with all weights that its config.json asks for, got '.*' "
     r"without 12 of them, transformer.h.2"),
    (lambda d: load_model(saved(make("Gemma2", num_key_value_heads=4), d, tokenizer())),
     "must be a decoder with a cache of what it has read, got '.*': "),
    (lambda d: load_model(tiny().transformer, tokenizer()),
     "^model must be a causal language model .* a matrix, got 'GPT2Model' with NoneType$"),
    (lambda d: load_model(torch.nn.Linear(2, 2), tokenizer()),
     "^model must be a causal language model .* a matrix, got 'Linear' with NoneType$"),
    (lambda d: load_model(torch.ao.quantization.quantize_dynamic(
        make("Llama"), {torch.nn.Linear}, torch.qint8), tokenizer()),
     "^model must be a causal language model .* a matrix, got 'LlamaForCausalLM' with Linear$"),
    (lambda d: load_model(saved(tiny(), d, tokenizer()) + "/config.json"),
     "^model must be a directory or a name on the hub, got the file " "'.*config.json'$"),
    (lambda d: load_model(saved(tiny(n_positions=6), d, tokenizer())),
     "^model must be a decoder with a cache of what it has read, got '.*': "),
])
def test_what_cannot_be_loaded_is_refused_in_one_line(call, words, tmp_path):
    with pytest.raises(ValueError, match=words) as e:
        call(tmp_path)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("given", [None, 5, lambda: make("Llama"), ["gpt2"]])
def test_what_is_neither_a_model_nor_a_name_is_not_looked_up(given):
    with pytest.raises(TypeError, match="^model must be a model, a directory or a name, got "):
        load_model(given, tokenizer())


def test_double_precision_learns_in_float32():
    lm, _ = load_model(make("Llama").double(), tokenizer())
    assert {p.dtype for p in lm.parameters()} == {torch.float32}


# --- a disk that is full

@pytest.mark.parametrize("error, told", [
    (OSError(28, "No space left on device"), "No space left on device"),
    (RuntimeError("Error while serializing: I/O error: File too large (os error 27)"),
     "File too large"),  # as safetensors says it
])
def test_a_full_disk_is_told_by_name_and_costs_nothing(error, told, tmp_path, monkeypatch):
    lm, path = rough(tiny()), tmp_path / "lm"
    save_model(path, lm, tokenizer())
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    tok = tokenizer()
    def full(self, *args, **kwargs): raise error
    monkeypatch.setattr(type(tok), "save_pretrained", full)
    with pytest.raises(OSError) as e:
        save_model(path, rough(tiny(), 1), tok)
    assert (e.value.strerror, e.value.filename) == (told, str(path))
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before
    assert list(tmp_path.iterdir()) == [path]


def test_other_errors_of_saving_keep_their_words(tmp_path, monkeypatch):
    lm = rough(tiny())
    monkeypatch.setattr(lm, "save_pretrained", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError): save_model(tmp_path / "lm", lm, tokenizer())
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of a file")
def test_a_real_limit_is_told_by_name(tmp_path):
    import resource
    before, handler = (resource.getrlimit(resource.RLIMIT_FSIZE),
                       signal.signal(signal.SIGXFSZ, signal.SIG_IGN))
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OSError) as e: save_model(tmp_path / "lm", tiny(), tokenizer())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert str(e.value) == f"[Errno 27] File too large: '{tmp_path}/lm'"
    assert not list(tmp_path.iterdir())


def test_a_difference_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setattr(hub, "_largest_errors", lambda lm: {"with padding on the left": math.nan})
    refused(tiny(), "with padding on the left, got 'x', whose differ by nan%")


ROUNDED = {  # kinds whose buffers follow from the config: angles, scales
    "llama": {}, "qwen3": {}, "phi": {}, "gpt_neox": {}, "gptj": dict(rotary_dim=4),
    "gemma2": dict(head_dim=8), "gemma3_text": dict(head_dim=8),
    "llama ": dict(rope_parameters=dict(rope_type="llama3", rope_theta=1e4, factor=4.0,
                                        low_freq_factor=1.0, high_freq_factor=4.0,
                                        original_max_position_embeddings=32)),
}


@pytest.mark.parametrize("kind", ROUNDED)
def test_a_model_in_bfloat16_gets_exact_buffers(kind, tmp_path):
    shape = dict(vocab_size=37, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128,
                 n_embd=32, n_layer=2, n_head=4, n_positions=128,
                 pad_token_id=None, bos_token_id=None, eos_token_id=0)
    known = transformers.CONFIG_MAPPING[kind.strip()]
    fields = {*known.__dataclass_fields__, *known.attribute_map}
    config = known(**{k: v for k, v in shape.items() if k in fields} | ROUNDED[kind])
    torch.manual_seed(0)
    lm, tok = transformers.AutoModelForCausalLM.from_config(config).bfloat16(), tokenizer()
    lm, _ = load_model(lm, tok)
    save_model(tmp_path, lm, tok)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    buffers = dict(again.named_buffers())
    assert all(torch.equal(b, buffers[n]) for n, b in lm.named_buffers())
    tokens = torch.randint(37, (1, 120), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(lm(tokens).logits, again(tokens).logits, atol=1e-5, rtol=0)


def test_the_callers_tokenizer_stays_as_it_is():
    def state(t): return len(t), t.pad_token, t.padding_side, t.special_tokens_map
    for pad in (None, "w0", "w3"):
        mine = tokenizer(pad=pad)
        mine.padding_side = "right"
        before = state(mine)
        _, ours = load_model(tiny(), mine)
        assert state(mine) == before and ours is not mine and ours.pad_token_id == 37
        for t in (mine, ours):  # a second model, of more tokens
            assert pad_outside(t, 57).pad_token_id == 57
        assert state(mine) == before and ours.pad_token_id == 37
        RewardTrainer(tiny(), mine, [dict(prompt="w6", chosen="w3", rejected="w5")], iterations=1,
                      device="cpu")
        assert state(mine) == before


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", None])
def test_a_policy_is_saved_in_the_dtype_that_is_asked_for(dtype, tmp_path):
    lm = rough(tiny())
    save_model(tmp_path, lm, tokenizer(), dtype=dtype)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert again.dtype == getattr(torch, dtype or "float32") and lm.dtype == torch.float32
    with pytest.raises(ValueError, match="^dtype must be"):
        save_model(tmp_path, lm, tokenizer(), dtype="int8")


def places(lm): return lm.lm_head, lm.model.layers[0].mlp.up_proj, lm.model.embed_tokens


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("change", [
    nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm,
    nn.utils.weight_norm, nn.utils.spectral_norm,
    lambda m: nn.utils.prune.random_unstructured(m, "weight", 0.5)])
@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated")
def test_weights_that_are_made_of_others_are_refused_by_name(change, place):
    lm = make("Llama")
    change(places(lm)[place])
    with pytest.raises(ValueError, match="^model must have weights that are parameters .* with "
                                         "(lm_head|model)"):
        load_model(lm, tokenizer())


@pytest.mark.parametrize("kind, words", [
    ("mamba", r"cache of what it has read, .* no past_key_values \(as Mamba\)"),
    ("mamba2", r"cache of what it has read, .* no past_key_values \(as Mamba\)"),
    ("llama4_text", r"whose base_model has the head \(as Llama 4\)")])
@pytest.mark.parametrize("lora", [0, 2])
def test_what_has_no_cache_or_no_body_is_refused_by_name(kind, words, lora):
    shape = dict(vocab_size=37, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                 eos_token_id=0, bos_token_id=0, pad_token_id=0, head_dim=16, num_heads=4)
    known = transformers.CONFIG_MAPPING[kind]
    config = known(**{k: v for k, v in shape.items() if k in known.__dataclass_fields__})
    lm = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=words): load_model(lm, tokenizer(), lora=lora)


def test_a_model_without_weights_is_refused():
    with pytest.raises(ValueError, match="^model must have weights, got 'GPT2.*' on the device"):
        load_model(tiny().to("meta"), tokenizer())


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe"])
def test_a_routers_loss_is_refused_by_name(kind):
    config = transformers.CONFIG_MAPPING[kind](
        vocab_size=37, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_experts=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1,
        eos_token_id=0, bos_token_id=0, pad_token_id=0)
    lm = transformers.AutoModelForCausalLM.from_config(config)
    load_model(lm, tokenizer())
    lm.config.output_router_logits, lm.config.router_aux_loss_coef = True, 0.1
    with pytest.raises(ValueError, match="^model must have output_router_logits = False"):
        load_model(lm, tokenizer())
    lm.config.router_aux_loss_coef = 0.0
    load_model(lm, tokenizer())


def test_a_turn_that_ends_no_response_is_told():
    chat = [[dict(role="user", content="w3")]]
    template = "{% for m in messages %}w5 {{ m['content'] }} w6 {% endfor %}w5"
    def own(ends, template=template):
        lm, tok = rough(tiny()), tokenizer()
        tok.add_special_tokens(dict(additional_special_tokens=["w6"]))
        tok.chat_template, lm.generation_config.eos_token_id = template, ends
        return RLHF(lm, tok, chat, lambda prompts, responses: [0.0] * len(responses))
    with pytest.warns(UserWarning, match="chat template ends a turn with 'w6', which ends no"):
        own(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        own([0, 6])
        own(0, template.replace("w6", "w0"))
        own(0, template.replace("w6", ""))
