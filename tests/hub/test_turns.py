"""Dialogues: what the model said itself, and what an environment did."""
import math

import pytest
import torch
from language.parts import without_times
from language.test_own_task import SMALL, count, tokenizer
from language_models import make

from rlhf_notes import DPO, RLHF
from rlhf_notes.formulas.advantage import gae_tokens
from rlhf_notes.hub.load import Classifier
from rlhf_notes.hub.turns import reply_tokens
from rlhf_notes.language.loop import rl_loss
from rlhf_notes.language.rollout import sample_table
from rlhf_notes.language.sampling import draw

ENDS = [2, *range(20, 37)]  # tokens that end a turn: every other
CHATML = ("{% for m in messages %}{% if m['role'] == 'user' %}w3 {{ m['content'] }} w5 {% else %}"
          "w6 {{ m['content'] }} w2 w4 {% endif %}{% endfor %}{% if add_generation_prompt %}w6"
          "{% endif %}")
ASKED = [[dict(role="user", content=f"w{i}")] for i in (8, 9)]


def echo(prompts, responses):
    "Two tokens that depend on the turn, until the dialogue is long."
    return [None if str(p).count("w9") > 1 else f" w9 w{7 + len(r.split()) % 2} "
            for p, r in zip(prompts, responses)]


def talking(environment=echo, prompts=("w3 w4", "w5"), kind="GPT2", template=None, **options):
    torch.manual_seed(0)
    lm = make(kind)
    lm.generation_config.eos_token_id = ENDS
    small = SMALL | dict(max_new_tokens=12, iterations=2, reward=count)
    return RLHF(lm, tokenizer(template), prompts, environment=environment, **small | options)


def alone(t, row, ids, u):
    "A dialogue token by token, without a cache: tokens, whose they are, whether it has an end."
    prompt, said, own, turn = row["prompt"], [], [], []
    while len(said) < len(u):
        logits = t.policy.lm(torch.tensor([ids + said])).logits[0, -1]
        turn.append(draw(logits, 1.0, u[len(said)]).item())
        said, own = said + turn[-1:], own + [True]
        if turn[-1] not in t.task.stop_token: continue
        text = t.task.decode([turn])[0]
        (reply,), turn = echo([prompt], [text]), []
        if reply is None: return said, own, True
        words = [int(w[1:]) for w in reply.split()]
        if not isinstance(prompt, str): words = [4, 3, *words, 5, 6]
        if len(said) + len(words) >= len(u): break
        said, own = said + words, own + [False] * len(words)
        prompt = prompt + text + reply if isinstance(prompt, str) else [
            *prompt, dict(role="assistant", content=text), dict(role="user", content=reply)]
    return said, own, False


@pytest.mark.parametrize("kind, prompts, template", [
    ("GPT2", ("w3 w4 w7", "w5"), None), ("Llama", ("w3 w4 w7", "w5"), None),
    ("GPT2", ASKED, CHATML)])
@torch.no_grad()
def test_a_dialogue_is_that_of_one_token_after_another(kind, prompts, template):
    t = talking(prompts=prompts, kind=kind, template=template)
    tokens, mask = (x.repeat_interleave(6, 0) for x in (t.task.tokens, t.task.mask))
    u = torch.rand(12, 12, generator=torch.Generator().manual_seed(3))
    rows = [row for row in t.task.rows for _ in range(6)]
    found = t.task.respond(t.policy.lm, tokens, mask, u, rows, 1.0)
    responses, own, has_end = found.whole, found.mask, found.has_end
    turns = 0
    for i in range(12):
        ids = tokens[i][mask[i]].tolist()
        said, mine, end = alone(t, t.task.rows[i // 6], ids, u[i])
        n = len(said)
        assert found.tokens[i, :n].tolist() == said == responses[i, :n].tolist()
        assert own[i].tolist() == mine + [False] * (12 - n) and has_end[i] == end
        assert (responses[i, n:] == t.task.pad_token).all()
        turns += 1 + sum(a and not b for a, b in zip(mine, mine[1:]))
    assert turns >= 24 and has_end.any()


@pytest.mark.parametrize("kind", ["GPT2", "Qwen2"])
def test_log_probs_of_the_policy_are_those_of_the_sampling(kind):
    t = talking(kind=kind, iterations=3, algo="ppo")
    t.iterate()
    x = t.loop.collect(t.policy.lm, *t.loop.prompts())
    logp, _, values = t.loop.forward(x)
    inside = x.response_mask
    assert (inside[:, :-1] < inside[:, 1:]).any()  # a turn after another's
    torch.testing.assert_close(logp[inside], x.logp[inside], atol=1e-5, rtol=0)
    torch.testing.assert_close(values[inside], x.values[inside], atol=1e-5, rtol=0)


@pytest.mark.parametrize("algo", ["grpo", "rloo", "ppo"])
def test_nobody_learns_from_the_environments_words(algo):
    t = talking(algo=algo, kl_coef=0.1)
    t.iterate()
    x, loop = t.rollout, t.loop
    rubbish = torch.full_like(x.logp, math.nan)
    y = type(x)(**vars(x) | {name: getattr(x, name).where(x.response_mask, rubbish)
                             for name in ("logp", "logp_ref", "values")
                             if vars(x)[name] is not None})
    found = []
    for rollout in (x, y):
        loop.rollout = rollout
        batch = loop.advantages()
        now = [z.detach().clone() for z in loop.forward(batch) if z is not None]
        if rollout is y:
            now = [z.where(x.response_mask, rubbish) for z in now]
        logp, entropy, *values = now
        for z in (logp, *values): z.requires_grad_()
        loss, _ = rl_loss(t.config, batch, logp, entropy, *values or [None], 0.1)
        loss.backward()
        found.append((loss, *(z.grad for z in (logp, *values))))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    grad = found[0][1]
    assert (grad[~x.response_mask] == 0).all() and (grad[x.response_mask] != 0).any()


def test_the_next_value_is_that_of_the_models_next_token():
    own = torch.tensor([[True, False, False, True, True, False]])
    rewards, values = torch.randn(2, 1, 6, generator=torch.Generator().manual_seed(0))
    found = gae_tokens(rewards, values, own)
    expected = gae_tokens(rewards[own][None], values[own][None])
    for x, y in zip(found, expected): torch.testing.assert_close(x[own], y[0])


def test_one_turn_is_todays_training():
    def once(prompts, responses): return [None] * len(responses)
    for options in (dict(), dict(algo="ppo"), dict(overlong="soft"), dict(microbatches=2)):
        one, today = (talking(environment=e, max_new_tokens=5, **options).learn()
                      for e in (once, None))
        for name, x in vars(today.rollout).items():
            y = getattr(one.rollout, name)
            y = y[:, :-1] if name == "parts" else y  # what the environment paid: nothing
            assert x is None or torch.equal(x, y), name
        assert without_times(one.rows) == without_times(today.rows)
        assert all(map(torch.equal, one.policy.parameters(), today.policy.parameters()))


def test_what_environment_and_reward_get():
    heard, scored = [], []
    async def environment(prompts, responses, completion_ids, word):
        heard.append([*zip(prompts, responses, completion_ids, word)])
        return [None if "w9 w9" in p else " w9 w9 " for p in prompts]
    def reward(prompts, responses, word):
        scored.extend(zip(prompts, responses, word))
        return count(prompts, responses)
    rows = [dict(prompt="w3 w4", word="w4"), dict(prompt="w5", word="w5")]
    t = talking(environment, rows, reward=reward, iterations=1, prompt_order="epochs").learn()
    first, second = heard
    assert {(p, w) for p, _, _, w in first} == {("w3 w4", "w4"), ("w5", "w5")}
    asked = [p + r + " w9 w9 " for p, r, *_ in first]
    assert [p for p, *_ in second] == [p for p in asked if p in {x for x, *_ in second}]
    for _, response, ids, _ in first + second:
        assert t.task.decode([ids]) == [response] and ids[-1] in ENDS
    x = t.rollout
    for (prompt, response, word), own, ids in zip(scored, x.response_mask, x.responses):
        assert prompt in ("w3 w4", "w5", *asked) and prompt.startswith(("w3 w4", "w5"))
        begin = 2 + own.tolist().index(False) if "w9 w9" in prompt else 0
        assert t.task.decode([ids[begin:][own[begin:]].tolist()]) == [response]
    assert 0 < sum("w9 w9" in prompt for prompt, *_ in scored) < 16
    shown = sample_table(t.task, x, 16)
    assert [row["score"] for row in shown] == x.scores.tolist()
    for row, (prompt, response, _) in zip(shown, scored):
        assert (row["response"].split()[-len(response.split()):] == response.split()
                or not response)
        assert ("w9 w9" in row["response"]) >= ("w9 w9" in prompt)


class Reader(Classifier):
    "A reward model that notes what it reads."
    def __init__(self, tokenizer):
        self.texts, self.tokenizer, self.model = [], tokenizer, torch.nn.Identity()

    def __call__(self, texts):
        self.texts += texts
        return torch.zeros(len(texts))


def test_a_reward_model_reads_whole_dialogues():
    for prompts, template in ((("w3 w4", "w5"), None), (ASKED, CHATML)):
        t = talking(prompts=prompts, template=template)
        reader = Reader(t.task.tokenizer)
        t.task.use(reader)
        t.iterate()
        shown = sample_table(t.task, t.rollout, 16)
        for text, row in zip(reader.texts, shown):
            if template is None:
                words = f"{row['prompt']} {row['response']}".split()
                ended = t.task.tokenizer.convert_tokens_to_ids(words[-1]) in t.task.stop_token
                assert t.task.decode([text]) == [" ".join(words[:-1] if ended else words)]
            else:
                assert [m["role"] for m in text] == ["user", "assistant"] * (len(text) // 2)
        assert template is None or max(map(len, reader.texts)) > 2


def test_a_chat_goes_on_as_its_template_writes_it():
    t = talking(prompts=ASKED, template=CHATML)
    row = dict(prompt=ASKED[0])
    assert reply_tokens(t.task, row, "w7 w8") == [4, 3, 7, 8, 5, 6]
    chat = [*ASKED[0], dict(role="assistant", content="w3"), dict(role="user", content="w7")]
    (whole, _), (begin, _) = t.task.encode([dict(prompt=chat)]), t.task.encode([row])
    assert whole[0].tolist() == [*begin[0].tolist(), 3, 2, *reply_tokens(t.task, row, "w7")]
    silent = CHATML.replace("w2 ", "")
    with pytest.raises(ValueError, match="^environment must have a chat template that ends"):
        talking(prompts=ASKED, template=silent)


def test_dialogues_are_the_same_again_and_other_loops_have_them_too():
    runs = [talking(dynamic_sampling=True, **options).learn()
            for options in (dict(), dict(), dict(seed=1))]
    assert without_times(runs[0].rows) == without_times(runs[1].rows)
    assert torch.equal(runs[0].rollout.tokens, runs[1].rollout.tokens)
    assert not torch.equal(runs[0].rollout.tokens, runs[2].rollout.tokens)
    one, parts = (talking(iterations=2, microbatches=n).learn() for n in (1, 2))
    assert torch.equal(one.rollout.tokens, parts.rollout.tokens)
    torch.testing.assert_close(one.rows[1]["policy_loss"], parts.rows[1]["policy_loss"],
                               rtol=1e-4, atol=1e-5)
    teacher = make("GPT2")
    taught = RLHF(make("GPT2"), tokenizer(), ["w3"], teacher=teacher, environment=echo,
                  **{k: x for k, x in SMALL.items() if k != "kl_coef"} | dict(iterations=1))
    assert taught.learn().rows[0]["kl_k1"] < 1


def test_evaluation_and_generate_take_turns():
    calls = []
    def environment(prompts, responses):
        calls.append(len(prompts))
        return echo(prompts, responses)
    def talk(prompts, responses): return [str(p).count("w9") for p in prompts]
    t = talking(environment, iterations=1, reward=talk, eval_prompts=["w3 w4", "w5"] * 9,
                eval_every=1)
    row = t.iterate()
    n = len(calls)
    assert 0 < row["score"] and 0 < t.evaluate() <= 4 and t.evaluate() == t.evaluate()
    assert len(calls) > n + 2
    n, said = len(calls), t.generate(["w3 w4", "w7"])  # it may be a prompt that it never saw
    assert len(calls) > n and any("w9" in text for text in said)  # what the environment says, too
    assert t.generate(["w3 w4", "w7"]) == said


def test_generate_shows_a_dialogue_where_the_prompts_bring_its_columns():
    def environment(prompts, responses, secret):
        return [s if s not in p else None for p, s in zip(prompts, secret)]
    rows = [dict(prompt="w3 w4", secret=" w8 w8 w8"), dict(prompt="w5", secret=" w8 w8 w8")]
    t = talking(environment, prompts=rows, iterations=1)
    asked = [dict(prompt="w3 w4", secret=" w9 w9 w9")]
    turns, wholes = t.generate(["w3 w4"], n=20)[0], t.generate(asked, n=20)[0]
    assert any("w9 w9 w9" in x for x in wholes) and not any("w9 w9 w9" in x for x in turns)
    for whole, turn in zip(wholes, turns): assert whole.startswith(turn.rstrip())
    assert asked == [dict(prompt="w3 w4", secret=" w9 w9 w9")]


@pytest.mark.parametrize("environment, options, words", [
    ("w9", {}, "environment must be a function, got 'w9'"),
    (lambda p, r, secret: [], {}, "environment must take prompts, .* the argument 'secret'"),
    (echo, dict(max_new_tokens=15), "max_new_tokens must fit into the model's context of 32")])
def test_an_environment_that_cannot_be_is_refused_by_name(environment, options, words):
    with pytest.raises(ValueError, match=f"^{words}"): talking(environment, **options)


@pytest.mark.parametrize("replies", [[None], "w" * 16, [9] * 16, None, [None] * 15 + [b"w9"]])
def test_replies_that_cannot_be_are_refused_by_name(replies):
    t = talking(lambda p, r: replies, max_new_tokens=14)
    with pytest.raises(ValueError, match="^environment must return a list of 16 texts, .*got"):
        t.iterate()


def test_dpo_has_no_environment():
    with pytest.raises(ValueError, match="^algo must be .*got .dpo"):
        RLHF(make("GPT2"), tokenizer(), ["w3"], count, "dpo", environment=echo, device="cpu")
    pairs = [dict(prompt="w3", chosen="w4", rejected="w5")]
    with pytest.raises((TypeError, ValueError), match="environment"):
        DPO(make("GPT2"), tokenizer(), pairs, environment=echo, device="cpu")
