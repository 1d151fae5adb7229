"""Dialogues whose turns are paid and credited, what is said and hints as teachers, all variants."""
import pytest
import torch
from hub.test_turns import ASKED, CHATML, ENDS, echo, talking
from jobs import RESULTS, names_of
from language.parts import without_times
from language.test_own_task import SMALL, count, tokenizer
from language_models import make

from rlhf_notes import POLICY_VARIANTS, RLHF, register_variant
from rlhf_notes.formulas.advantage import rloo_advantage
from rlhf_notes.formulas.grpo import BY_PROMPT
from rlhf_notes.hub.told import hinted_prompt, observed

LESSON_ROWS = [
    ("formulas/11_grpo", ("export-imports", "entropy-target"), "EntropyTarget"),
    ("formulas/50_credit", ("imports", "token-baseline"), "token_baseline"),
    ("studies/48_staleness", ("imports", "loglinear"), "loglinear")]


def paying(prompts, responses):
    "`echo`, and a number that depends on what was said for each turn."
    return [(reply, float(len(r.split())) / 4) for reply, r in
            zip(echo(prompts, responses), responses)]


def by_loops(x, G):
    "Advantage of each token from what each dialogue earned from its turn on."
    owns, B = x.response_mask, len(x)
    turns = [sorted({int(k) for k in x.turns[i][owns[i]]}) for i in range(B)]
    paid = x.paid.nan_to_num()
    def to_go(i, k):
        if k not in turns[i]: return 0.0
        late = x.scores[i] - paid[i].sum()
        return (paid[i, k:].sum() + late).item()
    out = torch.zeros(owns.shape)
    for i, t in owns.nonzero().tolist():
        k, first = int(x.turns[i, t]), i - i % G
        others = [j for j in range(first, first + G) if j != i]
        out[i, t] = to_go(i, k) - sum(to_go(j, k) for j in others) / len(others)
    return out


@pytest.mark.parametrize("reward", [None, count])
@pytest.mark.parametrize("algo", ["grpo", "rloo"])
def test_each_turn_is_credited_with_what_came_of_it(reward, algo):
    t = talking(paying, reward=reward, turn_credit="leave-one-out", algo=algo, kl_coef=0.0)
    t.iterate()
    x = t.loop.advantages()
    assert x.turns.max() > 0 and (x.paid[:, 0] > 0).any() and x.paid[:, 1].nan_to_num().any()
    torch.testing.assert_close(x.advantages, by_loops(x, t.config.group), atol=1e-5, rtol=0)
    parts = x.parts.nansum(1)
    torch.testing.assert_close(x.scores, parts)
    assert x.parts.shape[1] == 1 + (reward is not None)


def test_one_turn_is_rloos_advantage():
    t = talking(lambda prompts, responses: [None] * len(responses), max_new_tokens=5,
                turn_credit="leave-one-out", kl_coef=0.0)
    t.iterate()
    x = t.loop.advantages()
    A = rloo_advantage(x.scores.view(-1, t.config.group)).view(-1, 1)
    torch.testing.assert_close(x.advantages, A * x.response_mask, atol=1e-6, rtol=0)


def test_what_a_price_of_the_kl_costs_is_credited_to_its_turn():
    t = talking(paying, turn_credit="leave-one-out", kl_in_loss=False, kl_coef=0.3, iterations=2)
    t.iterate()
    t.iterate()
    x = t.loop.advantages()
    price = (x.rewards * x.response_mask).sum(1) - x.scores  # of whole dialogues
    first = (x.turns == 0) & x.response_mask
    G = t.config.group
    total = rloo_advantage((x.scores + price).view(-1, G)).view(-1, 1)
    torch.testing.assert_close(x.advantages[first], total.expand_as(first)[first], atol=1e-5,
                               rtol=0)
    assert price.abs().max() > 1e-3


def test_turns_are_numbered_with_what_was_replied():
    t = talking(paying, turn_credit="leave-one-out")
    t.iterate()
    for turns, own, whole in zip(*(getattr(t.rollout, n) for n in ("turns", "response_mask")),
                                 t.rollout.responses):
        n = int((turns >= 0).sum())
        assert (turns[:n] >= 0).all() and (turns[n:] == -1).all() and not own[n:].any()
        assert (turns[:n].diff() >= 0).all() and (turns[:n].diff() <= 1).all()
        starts = [0, *(i + 1 for i in range(n - 1) if turns[i + 1] > turns[i])]
        assert all(own[i] for i in starts)
        for i in starts[1:]: assert not own[i - 1] and whole[i - 1] not in ENDS[:1]


def test_without_pay_and_credit_nothing_changes():
    plain, paid = (talking(e, kl_coef=0.0).learn() for e in (
        echo, lambda prompts, responses: [(x, 0.0) for x in echo(prompts, responses)]))
    assert without_times(plain.rows) == without_times(paid.rows)
    assert all(map(torch.equal, plain.policy.parameters(), paid.policy.parameters()))


@pytest.mark.parametrize("replies, words", [
    ([("w9 ",)] * 16, "environment must return a list of 16 texts, .* or of pairs"),
    ([(3, 1.0)] * 16, "environment must return a list of 16 texts"),
    ([(None, "1")] * 16, "environment must return a list of 16 texts"),
    ([(None, float("inf"))] * 16, "environment must return a list of 16 texts")])
def test_pay_that_cannot_be_is_refused_by_name(replies, words):
    with pytest.raises(ValueError, match=f"^{words}"): talking(lambda p, r: replies).iterate()


def test_what_does_not_go_together_is_refused_by_name():
    def hint(prompts): return ["w3"] * len(prompts)
    with pytest.raises(ValueError, match="^environment must pay for each turn, by a pair"):
        talking(echo, reward=None).iterate()
    for options, words in (
            (dict(turn_credit="mean"), "turn_credit must be one of 'leave-one-out', None"),
            (dict(turn_credit="leave-one-out", algo="ppo"), "turn_credit must be left out for "),
            (dict(turn_credit="leave-one-out", environment=None), "turn_credit must be left out "),
            (dict(observation_coef=0.1, environment=None), "observation_coef must be left out "),
            (dict(observation_coef=-0.1), r"observation_coef must be in \[0, inf\)"),
            (dict(hint="w3"), "hint must be a function, got 'w3'"),
            (dict(hint=hint, turn_credit="leave-one-out"), "turn_credit must be left out with "),
            (dict(hint=hint, observation_coef=0.1), "observation_coef must be left out with hint"),
            (dict(hint=hint, algo="ppo"), "algo must be grpo or rloo with a hint"),
            (dict(hint=hint, kl_coef=0.1), "kl_coef must be left out for algo hint"),
            (dict(hint=hint, kl_in_loss=True), "kl_in_loss must be left out for algo hint"),
            (dict(hint=hint, lam=0.5), "lam must be left out for algo hint")):
        if "hint" in options and "kl_coef" not in options: options["kl_coef"] = None
        with pytest.raises(ValueError, match=f"^{words}"): hinting(**options)


def hinting(**options):
    "A small training with whatever is given; None = the default."
    options = dict(environment=echo) | SMALL | dict(max_new_tokens=12, reward=count) | options
    options = {k: x for k, x in options.items() if x is not None or k == "environment"}
    lm = make("GPT2")
    lm.generation_config.eos_token_id = ENDS
    return RLHF(lm, tokenizer(), ["w3 w4", "w5"], **options)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_observations_teach_with_the_gradient_of_their_loss(microbatches):
    found = []
    for coef in (0.0, 0.5):
        t = talking(paying, observation_coef=coef, microbatches=microbatches, kl_coef=0.0)
        x = t.loop.collect(t.policy.lm, *t.loop.prompts())
        t.loop.rollout = x
        batch = t.loop.advantages()
        t.loop.optimizer.tie()
        t.loop.optimizer.zero_grad()
        for part in t.loop.machine.parts(batch):
            t.loop.loss(part, batch)[0].backward()
        found.append([p.grad.clone() for p in t.policy.lm.parameters()])
    told, T = observed(batch), x.logp.shape[1]
    assert told.any() and not (told & x.response_mask).any()
    logits = t.policy.lm(x.tokens.masked_fill(~x.mask, 0), attention_mask=x.mask.long(),
                         position_ids=(x.mask.cumsum(1) - 1).clamp(min=0)).logits[:, -T - 1:-1]
    logp = logits.log_softmax(-1).gather(-1, x.responses[..., None])[..., 0]
    expected = torch.autograd.grad(-0.5 * logp[told].mean(), list(t.policy.lm.parameters()))
    for without, with_them, g in zip(*found, expected):
        torch.testing.assert_close(with_them - without, g, atol=2e-5, rtol=1e-3)


def test_told_a_hint_the_policy_teaches_itself():
    asked = []
    def hint(prompts, responses, word):
        asked.extend(zip(prompts, responses))
        return [None if i % 4 == 0 else f" {w} {w}" for i, w in enumerate(word)]
    rows = [dict(prompt="w3 w4", word="w7"), dict(prompt="w5", word="w8")]
    options = {k: x for k, x in SMALL.items() if k != "kl_coef"} | dict(iterations=1)
    t = RLHF(make("GPT2"), tokenizer(), rows, hint=hint, **options)
    x = t.loop.collect(t.policy.lm, *t.loop.prompts())
    t.loop.rollout = x
    A = t.loop.advantages().advantages
    assert (A[::4] == 0).all() and (A[1::4] != 0).any() and not A[~x.response_mask].any()
    Q = x.tokens.shape[1] - x.logp.shape[1]
    for i in (1, 2, 7, 13):
        prompt = x.tokens[i, :Q][x.mask[i, :Q]].tolist()
        n = int(x.response_mask[i].sum())
        word = {4: 7, 5: 8}[prompt[-1]]
        def logp(ids):
            tokens = torch.tensor([ids + x.responses[i, :n].tolist()])
            z = t.policy.lm(tokens).logits[0, len(ids) - 1:-1].log_softmax(-1)
            return z[torch.arange(n), x.responses[i, :n]].detach()
        torch.testing.assert_close(A[i, :n], logp([*prompt, word, word]) - logp(prompt), atol=1e-5,
                                   rtol=0)
    assert t.task.decode(x.responses[:1])[0].startswith(asked[0][1])
    t.learn()


def test_a_hint_for_a_chat_and_for_a_dialogue():
    assert hinted_prompt(ASKED[0], "w9") == [dict(role="user", content="w8\n\nw9")]
    assert hinted_prompt("w3", None) == "w3" and hinted_prompt(ASKED[0], None) is ASKED[0]
    def hint(responses): return ["w9" if len(r.split()) > 2 else None for r in responses]
    options = dict(prompts=ASKED, template=CHATML, hint=hint)
    for key in ("kl_coef",): options[key] = None
    t = chatting(**options)
    assert t.iterate()["kl_k1"] != 0
    with pytest.raises(ValueError, match="^hint must return a list of 16 texts"):
        chatting(**options | dict(hint=lambda p, r: "w3")).iterate()


def chatting(prompts, template, hint, **_):
    lm = make("GPT2")
    lm.generation_config.eos_token_id = ENDS
    small = {k: x for k, x in SMALL.items() if k != "kl_coef"} | dict(iterations=2)
    return RLHF(lm, tokenizer(template), prompts, hint=hint, environment=echo,
                **small | dict(max_new_tokens=8))


def trains(variant):
    "On responses, and on turns that are paid and credited."
    for environment, credit in ((None, None), (paying, "leave-one-out")):
        t = talking(environment, variant=variant, turn_credit=credit, epochs=2, iterations=2,
                    max_new_tokens=8)
        before = [p.clone() for p in t.policy.lm.parameters()]
        rows = t.learn().rows
        assert all(torch.isfinite(torch.tensor(r["policy_loss"])) for r in rows)
        assert any(not torch.equal(a, b) for a, b in zip(before, t.policy.lm.parameters()))


@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_each_variant_trains_on_responses_and_on_turns(variant):
    trains(variant)


@pytest.mark.parametrize("notebook, cells, name", LESSON_ROWS)
def test_each_row_of_a_lesson_trains_on_responses_and_on_turns(notebook, cells, name, own_variant):
    row = names_of(RESULTS.parents[1] / f"{notebook}.ipynb", *cells)[name]
    row = row(target=9.0) if isinstance(row, type) else row
    register_variant(own_variant, row)
    trains(own_variant)
    if name == "EntropyTarget": assert row.coef > 0.02


def test_an_objective_that_asks_for_the_group_gets_prompts_together(own_variant):
    seen = []
    def objective(ratio, advantage, logp, mask, eps_low, eps_high, group):
        seen.append(advantage.amax(1).view(-1, group).sum(1) + advantage.amin(1).view(
            -1, group).sum(1))
        return ratio * advantage
    register_variant(own_variant, objective)
    talking(None, variant=own_variant, minibatches=2, epochs=2, kl_coef=0.0).iterate()
    assert len(seen) == 4
    assert torch.stack(seen).abs().max() < 1e-4  # GRPO's advantages of a prompt add up to 0
    for options in (dict(minibatches=8), dict(minibatches=2, microbatches=4)):
        with pytest.raises(ValueError, match=f"^{[*options][-1]} must keep 4 responses together"):
            talking(None, variant=own_variant, kl_coef=0.0, **options)
    talking(None, variant=own_variant, minibatches=2, microbatches=2, kl_coef=0.0).iterate()
    register_variant(own_variant, lambda *x: x[0] * x[1])
    assert own_variant not in BY_PROMPT
