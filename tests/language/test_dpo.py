import csv
import json
import math
from dataclasses import replace

import pytest
import torch
from language.parts import TINY, After, Pretend, tiny_lm, vector, weights, without_times
from language_models import make
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from rlhf_notes.formulas.preference import DPO_KINDS
from rlhf_notes.formulas.reward import RewardNorm
from rlhf_notes.hub.trainers import DPO as UserDPO
from rlhf_notes.hub.trainers import RLHF
from rlhf_notes.language import dpo as D
from rlhf_notes.language.machine import Machine
from rlhf_notes.reviews import pipeline as P
from rlhf_notes.reviews.config import dpo_config
from rlhf_notes.reviews.reward_model import RewardTraining, choices_of
from rlhf_notes.reviews.task import Reviews, make_tokenizer
from rlhf_notes.training import fit
from rlhf_notes.training.runs import Run

DPO = dpo_config(TINY, batch=4)
TASK = Reviews(make_tokenizer(), 16, 8)
OWN = [dict(prompt="about the hotel .", chosen="it was good .", rejected="it was bad ."),
       dict(prompt="about the film .", chosen="it was superb .", rejected="the plot was dull .")]


def noisy_lm():
    lm, g = tiny_lm(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in lm.parameters(): p.add_(0.1 * torch.randn(p.shape, generator=g))
    return lm


def trainer(config=DPO, machine=None):
    lm = noisy_lm()
    return D.DPOLoop(config, lm, TASK, choices_of(config, lm, TASK), machine)


def own(**options):
    return UserDPO(tiny_lm(), make_tokenizer(), OWN,
                   **dict(max_new_tokens=6, batch=2, minibatches=1, device="cpu") | options)


def test_the_loss_by_hand():
    logp, ref, beta = (torch.tensor([[-1.0, -3.0, -2.0], [-5.0, -4.0, -9.0]]),
                       torch.tensor([[-2.0, -2.0, -2.0], [-4.0, -4.0, -8.0]]), 0.5)
    leads = [(-1 + 2) - (-3 + 2), (-1 + 2) - (-2 + 2), (-5 + 4) - (-4 + 4), (-5 + 4) - (-9 + 8)]
    assert D.choice_loss(logp, ref, beta).item() == pytest.approx(
        sum(math.log1p(math.exp(-beta * h)) for h in leads) / 4)


def test_the_chosen_response_comes_first():
    prompts, responses = torch.arange(8).view(2, 4, 1), torch.arange(10, 18).view(2, 4, 1)
    counts = torch.ones(2, 4, 1, dtype=torch.bool)
    counts[0, 3] = False
    found = D.chosen_first(prompts, counts, responses, counts, torch.tensor([2, 0]))
    assert found.tokens.tolist() == [
        [[2, 12], [0, 10], [1, 11], [3, 0]], [[4, 14], [5, 15], [6, 16], [7, 17]]]
    assert found.response_mask[0, :, 0].tolist() == [True, True, True, False]
    assert found.mask[0, 3].tolist() == [False, True]


def test_the_choices_are_those_of_the_reward_model():
    t, other = trainer(), RewardTraining(TINY, noisy_lm(), TASK)
    prompts, mask, responses, response_mask, best = other.labels
    for i in range(DPO.labels):
        assert torch.equal(t.choices.tokens[i, 0, -16:][response_mask[i, best[i]]],
                           responses[i, best[i]][response_mask[i, best[i]]])
    assert len(t.choices) == DPO.labels and t.choices.tokens.shape[1] == 4


def test_the_reference_is_asked_once_and_is_the_pretrained_model():
    t = trainer()
    by_hand = t.reference_sums(t.choices)
    torch.testing.assert_close(t.choices.logp_ref, by_hand)
    before = t.choices.logp_ref.clone()
    first = t.iterate()
    assert torch.equal(before, t.choices.logp_ref) and not t.choices.logp_ref.requires_grad
    assert not torch.allclose(t.log_probs(t.choices), before)
    assert first["policy_loss"] == pytest.approx(math.log(2), abs=0.1)
    torch.testing.assert_close(
        vector(t.reference.parameters()), vector(noisy_lm().parameters()), rtol=0, atol=0)


def test_log_probs_are_sums_over_what_counts_at_the_temperature():
    t = trainer(replace(DPO, temperature=0.7))
    one = t.choices[:1]
    logits = t.policy.lm(
        one.tokens[0].masked_fill(~one.mask[0], 0), attention_mask=one.mask[0].long(),
        position_ids=(one.mask[0].long().cumsum(1) - 1).clamp(min=0)).logits
    logp = (logits[:, -17:-1] / 0.7).log_softmax(-1).gather(2, one.tokens[0, :, -16:, None])[..., 0]
    torch.testing.assert_close(t.log_probs(one)[0], (logp * one.response_mask[0]).sum(1))


def test_an_iteration_takes_its_prompts_in_steps():
    c = replace(DPO, iterations=5)
    t, seen, step = trainer(c), [], D.DPOLoop.step
    t.step = lambda batch: (seen.append(batch.tokens), step(t, batch))[1]
    for _ in range(5): row = t.iterate()
    assert [len(x) for x in seen] == [2] * 10 and t.steps == 10 and row["iteration"] == 5
    # a pass
    for first in (0, 4):
        assert (len({x.numpy().tobytes() for x in torch.cat(seen[first:first + 4])})
                == len({x.numpy().tobytes() for x in t.choices.tokens}))
    assert row["learning_rate"] == pytest.approx(c.learning_rate / 5)


def test_microbatches_and_processes_take_the_step_of_one(monkeypatch):
    one, parts = (trainer(replace(DPO, minibatches=1)),
                  trainer(replace(DPO, minibatches=1, microbatches=2)))
    a, b = one.step(one.choices[:4]), parts.step(parts.choices[:4])
    torch.testing.assert_close(weights(one), weights(parts), rtol=0, atol=1e-6)
    assert {k: x.item() for k, x in a.items()} == pytest.approx(
        {k: x.item() for k, x in b.items()}, rel=1e-4, abs=1e-6)
    gradients = []
    for index in range(2):
        machine = Machine()
        machine.rank, machine.processes = index, 2
        gradients.append(gradient(machine))
    torch.testing.assert_close(sum(gradients) / 2, gradient(Machine()))


def gradient(machine):
    t = trainer(replace(DPO, minibatches=1), machine)
    t.update = lambda: torch.zeros(())
    t.step(t.choices[:4])
    return vector(p.grad for p in t.policy.lm.parameters())


def test_what_is_logged_of_a_step():
    t = trainer(replace(DPO, dpo_beta=0.2))
    logp = t.choices[:2].logp_ref + torch.tensor([[2.0, 1.0, 0.0, 3.0], [0.0, -1.0, 0.0, 0.0]])
    t.log_probs = lambda part: logp
    found = t.loss(t.choices[:2], t.choices[:2])[1]
    assert found["margin"].item() == pytest.approx(0.2 * (1 + 2 - 1 + 1) / 6)
    assert found["accuracy"].item() == pytest.approx(3 / 6)
    torch.testing.assert_close(
        found["policy_loss"], D.choice_loss(logp, t.choices[:2].logp_ref, 0.2))


def test_the_score_is_the_implicit_reward():
    t = trainer(replace(DPO, dpo_beta=0.3, learning_rate=0.02))
    for _ in range(3): t.iterate()
    rollout = P.evaluate(t).rollout
    by_hand = 0.3 * ((rollout.logp - rollout.logp_ref) * rollout.response_mask).sum(1)
    torch.testing.assert_close(rollout.scores, by_hand, atol=1e-5, rtol=1e-4)
    assert rollout.scores.abs().max() > 0.01


def test_a_nan_stops_the_training():
    t = trainer()
    t.policy.lm.transformer.wte.weight.data[5] = math.nan
    with pytest.raises(FloatingPointError, match="stage rl, iteration 1: .*policy_loss is nan"):
        t.iterate()


def test_preferences_of_ones_own():
    t = own(iterations=40, learning_rate=1e-2)
    choices = t.loop.choices
    # each with its end
    assert choices.tokens.shape == (2, 2, 10)
    assert choices.response_mask.sum(-1).tolist() == [[5, 5], [5, 6]]
    assert t.task.decode(choices.tokens[1, 1:, -6:]) == ["the plot was dull ."]
    for k in (0, 1):
        assert t.task.decode(choices.tokens[:, k, :-6]) == [row["prompt"] for row in OWN]
    rows = t.learn().rows
    assert rows[0]["accuracy"] == 0.0 or rows[0]["margin"] < 0.1
    assert rows[-1]["accuracy"] == 1.0 and rows[-1]["margin"] > 1 and rows[-1]["policy_loss"] < 0.3
    assert len(t.generate(["about the hotel ."])) == 1


def test_the_loss_of_a_pair_may_be_another():
    def first(**options): return own(iterations=1, **options).learn().rows[0]["policy_loss"]
    assert first() == pytest.approx(math.log(2), abs=1e-3)
    assert first(kind="ipo") == pytest.approx((1 / (2 * 0.3)) ** 2, rel=1e-3)  # dpo_beta is 0.3
    logp, ref = torch.tensor([[0.0, -2.0]]), torch.zeros(1, 2)
    t = own(label_smoothing=0.25, dpo_beta=0.5)
    t.loop.log_probs, part = lambda part: logp, replace(t.loop.choices, logp_ref=ref)
    loss = t.loop.loss(part, part)[0].item()
    assert loss == pytest.approx(0.75 * math.log1p(math.exp(-1)) + 0.25 * math.log1p(math.e))
    with pytest.raises(ValueError, match="^dpo_kind must be 'sigmoid', 'ipo'.*, got 'hinge'$"):
        own(kind="hinge")
    for name in DPO_KINDS: assert own(kind=name).config.dpo_kind == name


def test_responses_may_be_the_messages_of_a_chat():
    as_chats = [row | {name: [dict(role="assistant", content=row[name])]
                       for name in ("chosen", "rejected")} for row in OWN]
    t = UserDPO(tiny_lm(), make_tokenizer(), as_chats, max_new_tokens=6, batch=2, minibatches=1,
                device="cpu")
    assert torch.equal(t.loop.choices.tokens, own().loop.choices.tokens)
    with pytest.raises(ValueError, match="prompts must have a chosen response, a string, got .*x"):
        UserDPO(tiny_lm(), make_tokenizer(), [OWN[0] | dict(chosen=[{}, "x"])], device="cpu")


def test_a_trained_policy_loads(tmp_path):
    t = own(iterations=1).learn()
    t.save(tmp_path / "p")
    assert RLHF.load(tmp_path / "p").generate(["about the hotel ."]) == t.generate(
        ["about the hotel ."])


@pytest.mark.parametrize("rows, words", [
    ([dict(prompt="about", chosen="about", rejectd="about")],
     "prompts must have the columns prompt, chosen and rejected, got prompt, chosen, rejectd$"),
    ([OWN[0], OWN[0] | dict(rejected=3)],
     r"prompts must have a rejected response, a string, got 3 in prompts\[1\]"),
    ([OWN[0], OWN[1] | dict(chosen="it was good and it was good .")],
     r"max_new_tokens must hold each response with its end, 9 tokens in prompts\[1\], got 6"),
    ([OWN[0], OWN[1] | dict(chosen="it was delightful .")],
     "prompts must be texts that the tokenizer can read, got 'it was delightful .'"),
    ([], "prompts must not be empty"),
    ([7], r"prompts must be strings.*prompts\[0\]")])
def test_preferences_that_cannot_be_used(rows, words):
    with pytest.raises(ValueError, match=words):
        UserDPO(tiny_lm(), make_tokenizer(), rows, max_new_tokens=6, device="cpu")


def test_preferences_need_an_end():
    tokenizer, lm = make_tokenizer(), tiny_lm()
    tokenizer.eos_token = lm.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="tokenizer must have a token for the end of a text"):
        UserDPO(lm, tokenizer, OWN, max_new_tokens=6, device="cpu")


# --- a response as it stands behind its prompt

LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789+=: ", "\n"]
TURNS = ("{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}"
         "{% if add_generation_prompt %}<turn>assistant\n{% endif %}")


def spelling(merges=(), space=False, template=None):
    "A tokenizer of letters; `space` puts one before each text, as Llama 2's does."
    vocab = ["<eos>", "<turn>", "<end>", *LETTERS, "\u2581", *map("".join, merges)]
    t = Tokenizer(models.BPE({x: i for i, x in enumerate(vocab)}, list(merges)))
    if space:
        t.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"),
                                             normalizers.Replace(" ", "\u2581")])
        t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(),
                                       decoders.Strip(" ", 1, 0)])
    else:
        t.decoder = decoders.Fuse()
    tok = PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<eos>", chat_template=template)
    tok.add_special_tokens({"additional_special_tokens": ["<turn>", "<end>"]})
    return tok


def chosen(tok, prompt, response, ends=0, **options):
    "The text that DPO reads, and the tokens of its response."
    lm = make("Llama", vocab_size=len(tok), max_position_embeddings=128)
    lm.generation_config.eos_token_id = ends
    row = dict(prompt=prompt, chosen=response, rejected="no") | options
    t = UserDPO(lm, tok, [row], max_new_tokens=24, batch=1, minibatches=1, device="cpu")
    keep, c = t.loop.choices.response_mask[0, 0], t.loop.choices
    whole = c.tokens[0, 0][c.mask[0, 0]]
    return tok.decode(whole[:len(whole) - int((~keep).sum())]), c.tokens[0, 0, -24:][keep].tolist()


@pytest.mark.parametrize("space", [False, True])
@pytest.mark.parametrize("prompt, response", [
    ("2+3=", "5"), ("say: ", "hi"), ("ab", "cd"), ("a", "\nb")])
def test_a_response_continues_the_text_of_its_prompt(space, prompt, response):
    "Also where a token would reach across the border, as `bc` does."
    tok = spelling([("b", "c"), ("\u2581", "h")], space)
    text, ids = chosen(tok, prompt, response)
    assert text == f"{prompt}{response}<eos>" and tok.convert_tokens_to_ids("bc") not in ids


USER = [dict(role="user", content="what is 2")]


def test_a_chat_ends_as_generation_would_end_it():
    "With the end of the turn, where it is one of the ends; else with that of the text."
    asked = "<turn>user\nwhat is 2<end>\n<turn>assistant\n"
    tok = spelling(template=TURNS)
    assert chosen(tok, USER, "five", [0, 2])[0] == f"{asked}five<end>"
    assert chosen(spelling(template=TURNS), USER, "five")[0] == f"{asked}five<end>\n<eos>"
    assert chosen(spelling(template=TURNS), USER, "five<eos>ab")[0] == f"{asked}five<eos>"


def test_a_template_is_read_with_its_options():
    template = "{% if tools %}t{% endif %}{% if loud %}l{% endif %}" + TURNS
    options = dict(tools=[dict(name="f")], chat_template_kwargs=dict(loud=True))
    text, _ = chosen(spelling(template=template), USER, "five", 2, **options)
    assert text == "tl<turn>user\nwhat is 2<end>\n<turn>assistant\nfive<end>"
    counting = "{{ messages|length }}" + TURNS
    with pytest.raises(ValueError, match="template begins alike with and without a response, got"):
        chosen(spelling(template=counting), USER, "five")


@pytest.mark.parametrize("opened", ["hm", "<think>\n", "<think>\n\n</think>\n\n"])
def test_what_a_generation_prompt_opens_is_left_out(opened):
    "The prompt ends where the two texts part, as TRL's does."
    other = TURNS.replace("<turn>assistant\n{%", f"<turn>assistant\n{opened}{{%")
    tok = spelling(template=other)
    text, response = chosen(tok, USER, "five", 2)
    assert text == "<turn>user\nwhat is 2<end>\n<turn>assistant\nfive<end>"
    assert tok.decode(response) == "five<end>"


def test_a_response_has_tokens_of_the_model():
    tok = spelling()
    tok.add_tokens(["THINK"])
    lm = make("Llama", vocab_size=len(tok) - 1)
    rows = [dict(prompt="a", chosen="THINK", rejected="b")]
    with pytest.raises(ValueError, match="^prompts must have tokens among .* got 'THINK'"):
        UserDPO(lm, tok, rows, device="cpu")


@pytest.mark.parametrize("options", [dict(variant="gspo"), dict(kl_coef=1.0), dict(labels=8)])
def test_what_preferences_do_not_use_is_refused(options):
    with pytest.raises(ValueError, match=f"^{min(options)} must be an option of "): own(**options)


def test_dpo_does_not_learn_from_a_reward():
    with pytest.raises(
        ValueError, match="^algo must be 'ppo', 'grpo', 'rloo', 'teacher' or 'hint', got 'dpo'"):
        RLHF(tiny_lm(), make_tokenizer(), ["about"], lambda p, r: [0.0] * len(r), algo="dpo")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("dpo") / "run"
    return (path, *P.train(P.Training(DPO), Run.create(path, {"task": "rlhf", "seed": 3})))


def test_a_whole_run(whole):
    path, t, rows, summary = whole
    table = list(csv.DictReader(open(path / "metrics.csv")))
    assert [r["kl_k1"] != "" for r in table] == [False, True, False, True] == [
        r["true_score"] != "" for r in table]
    assert all(float(r[name]) == float(r[name]) for r in table
               for name in ("policy_loss", "margin", "accuracy", "grad_norm", "learning_rate"))
    assert not (path / "reward_model.csv").exists()
    assert len(list(csv.DictReader(open(path / "samples.csv")))) == 3 * P.SHOWN
    assert summary["algo"] == "dpo"
    assert summary["seconds"]["reward_model"] == 0
    assert summary["steps"] == 16
    assert summary["kl"] == rows[-1]["kl_k1"]
    assert summary["true_score"] == rows[-1]["true_score"]
    assert summary["proxy_score"] == rows[-1]["score"]
    assert summary["win_rate_vs_sft"] is not None
    assert json.loads((path / "summary.json").read_text())["kl"] == summary["kl"]
    assert (path / "curve.svg").exists() and (path / "policy").exists()


@pytest.mark.parametrize("steps", [2, 5])
def test_an_interrupted_run_resumed_is_one_that_was_not(whole, tmp_path, monkeypatch, steps):
    monkeypatch.setattr(Run, "save_figure", lambda *args, **how: None)
    run, original = Run.create(tmp_path / "run", {"task": "rlhf", "seed": 3}), fit.stop_on_interrupt
    monkeypatch.setattr(fit, "stop_on_interrupt", lambda *say: After(steps))
    P.train(P.Training(DPO), run)
    monkeypatch.setattr(fit, "stop_on_interrupt", original)
    run = Run.resume(tmp_path / "run")
    assert run.checkpoint["name"] == ("sft" if steps == 2 else "rl")
    t, rows, summary = P.train(P.Training(DPO), run)
    assert without_times(rows) == without_times(whole[2])
    assert torch.equal(weights(t), weights(whole[1]))
    assert P.Training(DPO).steps == 3 + 4
