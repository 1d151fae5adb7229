"A reward model from pairs: what it learns, in which order, and that others load it."
import pytest
import torch
from language.test_own_task import TEMPLATE, WORDS, make, tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_notes import RLHF, RewardTrainer

PROMPTS = "w6", "w7", "w8", "w9", "w6 w7", "w7 w8", "w8 w9"
PAIRS = [dict(prompt=p, chosen="w3 w4", rejected="w5 w4") for p in PROMPTS]


def own(pairs=PAIRS, kind="GPT2", tok=None, **options):
    options = dict(iterations=30, learning_rate=3e-3, batch=4, device="cpu") | options
    return RewardTrainer(make(kind), tok or tokenizer(), pairs, **options)


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_it_learns_the_choices_and_is_loaded_by_transformers(kind, tmp_path):
    t = own(kind=kind)
    assert t.learn() is t and t.rows[-1]["accuracy"] == 1 and len(t.rows) == 30
    good, bad = t(["w9 w6 w3 w4", "w9 w6 w5 w4"])
    assert good > bad
    t.save(tmp_path / "rm")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    tok = AutoTokenizer.from_pretrained(tmp_path / "rm")
    with torch.no_grad(): theirs = model(**tok(["w9 w6 w3 w4"], return_tensors="pt")).logits[0, 0]
    torch.testing.assert_close(theirs, good, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind, saved", [("GPT2", False), ("GPT2", True), ("Qwen2", True)])
def test_it_is_the_reward_of_a_policy(kind, saved, tmp_path):
    t = own(kind=kind).learn()
    t.save(tmp_path / "rm")
    rlhf = RLHF(make("GPT2"), tokenizer(), ["w6", "w7"], reward=tmp_path / "rm" if saved else t,
                max_new_tokens=4, iterations=1, batch=8, minibatches=1, device="cpu")
    row = rlhf.learn().rows[0]
    x, ends = rlhf.rollout, (0, 2)
    whole = [[t for t in row[real].tolist() if t not in ends]
             for row, real in zip(x.tokens, torch.cat([x.mask[:, :-4], x.response_mask], 1))]
    with torch.no_grad():
        alone = [t.model(torch.tensor([ids])).logits.item() for ids in whole]
    assert row["score"] == pytest.approx(sum(alone) / 8, abs=1e-4)


def test_markers_in_a_prompt_are_read():
    "A template that was applied before, whose markers no text would bring back."
    prompt = "w1 w2 w6 w1"  # markers of the tokenizer, which decoding leaves out
    t = own([dict(prompt=prompt, chosen="w3 w4", rejected="w5 w1")], iterations=1)
    assert [row[mask > 0].tolist() for row, mask in zip(t.tokens[0], t.mask[0])] == [
        [1, 1, 2, 6, 1, 3, 4], [1, 1, 2, 6, 1, 5, 1]]
    def read(t):
        seen, t.score = [], lambda tokens, mask: seen.append(tokens) or torch.zeros(len(tokens))
        RLHF(make("GPT2"), tokenizer(), [prompt], reward=t, max_new_tokens=4, iterations=1,
             batch=8, minibatches=1, device="cpu").learn()
        return seen[0][:, :5].tolist()
    assert read(t) == [[1, 1, 2, 6, 1]] * 8
    other = tokenizer()
    words = {w: (i + 1) % len(WORDS) for i, w in enumerate(WORDS)}  # other numbers
    other.backend_tokenizer.model = WordLevel(words, unk_token="w0")
    t = own([dict(prompt=prompt, chosen="w3", rejected="w5")], tok=other, iterations=1)
    assert read(t) == [[1, 2, 3, 7, 2]] * 8


def test_prompt_and_response_are_read_together_strings_and_chats():
    t = own([dict(prompt="w6", chosen="w3", rejected="w5")], iterations=1)
    assert t.tokenizer.batch_decode(t.tokens[0]) == ["w1 w6 w3", "w1 w6 w5"]
    chat = [dict(role="user", content="w6")]
    t = own([dict(prompt=chat, chosen="w3", rejected="w5")], tok=tokenizer(TEMPLATE), iterations=1)
    good, bad = t.tokenizer.batch_decode(t.tokens[0])
    assert "w6" in good and good.replace("w3", "w5") == bad


def test_the_centre_holds_the_scores():
    "Without it nothing says where 0 is."
    def mean(centre):
        t = own(centre=centre, iterations=60)
        with torch.no_grad(): t.model.score.weight.mul_(3.0)
        t.learn()
        with torch.no_grad(): scores = t.score(t.tokens.flatten(0, 1), t.mask.flatten(0, 1))
        return scores.view(-1, 2).sum(1).abs().mean().item()
    assert mean(0.1) < 0.3 * mean(0.0)


def test_all_pairs_come_once_before_any_comes_again():
    t, drawn = own(batch=3), []
    for t.iteration in range(7): drawn += t.pairs().tolist()  # 21 of 7 pairs
    assert [sorted(drawn[i:i + 7]) for i in (0, 7, 14)] == [[*range(7)]] * 3
    assert drawn[:7] != drawn[7:14] and len(own(batch=99).pairs()) == 7


def test_seeds_and_the_rate():
    a, b, c = (own(seed=s, iterations=3).learn() for s in (0, 0, 1))
    assert a.rows == b.rows and a.rows[0]["loss"] != c.rows[0]["loss"]
    assert not torch.equal(own(seed=0).model.score.weight, own(seed=1).model.score.weight)
    assert [r["learning_rate"] for r in a.rows] == pytest.approx([3e-3, 2e-3, 1e-3])
    t = own().learn(callback=lambda trainer, row: row["iteration"] < 2)
    assert t.iteration == 2 and t.learn().iteration == 30


@pytest.mark.parametrize("change, words", [
    (dict(pairs=["w3"]), "^prompts must have the columns prompt, chosen and rejected"),
    (dict(pairs=[]), "^prompts must not be empty"),
    (dict(centre=-1.0), "^centre must be"), (dict(iterations=0), "^iterations must be"),
    (dict(learning_rate=0.0), "^learning_rate must be"), (dict(batch=0), "^batch must be"),
    (dict(device="tpu"), "^device must be")])
def test_what_cannot_be_is_refused(change, words):
    with pytest.raises(ValueError, match=words): own(**change)
    with pytest.raises(TypeError, match="group"): own(group=4)


def test_a_margin_is_what_the_loss_subtracts():
    pairs = [p | dict(margin=float(i)) for i, p in enumerate(PAIRS)]
    t, plain = own(pairs, batch=7), own(batch=7)
    rows = t.pairs()
    with torch.no_grad():
        good, bad = t.score(*(x[rows].flatten(0, 1) for x in (t.tokens, t.mask))).view(-1, 2).T
    by_hand = torch.nn.functional.softplus(bad - good + rows.float()).mean()
    assert t.iterate()["loss"] == pytest.approx(by_hand.item(), rel=1e-5)
    assert plain.iterate()["loss"] < 1 < by_hand
    for wrong in (None, "3", float("nan")):
        with pytest.raises(ValueError, match=r"^prompts must have finite numbers as margin.*\[2\]"):
            own([*pairs[:2], pairs[2] | dict(margin=wrong)])
