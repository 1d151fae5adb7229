"What users' own code may do beside a training, and what it is told."
import warnings

import pytest
import torch
from language.parts import without_times
from language.test_own_task import SMALL, count, make, own, tokenizer

from rlhf_notes import DPO, RLHF, register_variant
from rlhf_notes.formulas.advantage import group_advantage
from rlhf_notes.language.dpo import DPOLoop
from rlhf_notes.language.loop import Loop

CHATML = ("{% for m in messages %}{% if m['role'] == 'user' %}w3 {{ m['content'] }} w5 {% else %}"
          "w6 {{ m['content'] }} w2 w4 {% endif %}{% endfor %}{% if add_generation_prompt %}w6"
          "{% endif %}")


def chats(): return [[dict(role="user", content=f"w{i}")] for i in (7, 8)]


def test_what_a_reward_does_to_its_arguments_stays_with_it():
    "Messages that grow, columns that change, responses that are sorted away."
    seen, mine = [], [dict(prompt=chat, n=[1, 2]) for chat in chats()]
    def rude(prompts, responses, n):
        for p in prompts: p.append(dict(role="assistant", content="w9"))
        for x in n: x.clear()
        responses.sort()
        return [0.0] * len(responses)
    def calm(prompts, responses, n):
        seen.append((len(prompts[0]), n[0]))
        return [float(len(r)) for r in responses]
    torch.manual_seed(0)
    lm, t = make("GPT2"), tokenizer(CHATML)
    lm.generation_config.eos_token_id = [2]
    common = SMALL | dict(iterations=3, device="cpu")
    both = RLHF(lm, t, mine, [rude, calm], **common).learn()
    assert seen == [(1, [1, 2])] * 3
    assert mine == [dict(prompt=chat, n=[1, 2]) for chat in chats()] == both.task.rows
    torch.manual_seed(0)
    lm = make("GPT2")
    lm.generation_config.eos_token_id = [2]
    alone = RLHF(lm, tokenizer(CHATML), mine, calm, **common).learn()
    assert [r["score"] for r in alone.rows] == [r["score"] for r in both.rows]


def test_an_environment_cannot_change_what_the_reward_sees():
    heard = []
    def environment(prompts, responses, n):
        for x in n: x.append(3)
        prompts.clear()
        return [None] * len(responses)
    def reward(prompts, responses, n):
        heard.append(n[0])
        return [0.0] * len(responses)
    own(prompts=[dict(prompt="w3", n=[1])], reward=reward, environment=environment,
        iterations=2).learn()
    assert heard == [[1], [1]]


def test_after_the_last_iteration_nothing_moves():
    t = own(reward=count, iterations=2).learn()
    pairs = [dict(prompt="w3", chosen="w4", rejected="w5")] * 4
    dpo = DPO(make("GPT2"), tokenizer(), pairs, max_new_tokens=3, iterations=2, batch=2,
              minibatches=1, device="cpu").learn()
    for trainer in (t, dpo):
        before = trainer.loop.optimizer.vector.detach().clone()
        for _ in range(2):
            with pytest.raises(ValueError, match="^iterations must be more than 2 to go on"):
                trainer.iterate()
        assert torch.equal(before, trainer.loop.optimizer.vector) and trainer.iteration == 2
        assert trainer.learn() is trainer  # nothing is left


def test_a_policy_of_a_variant_that_is_not_there_generates_and_does_not_learn(
        own_variant, tmp_path):
    register_variant(own_variant, lambda r, A, logp, mask, low, high: r * A)
    t = own(reward=count, variant=own_variant, iterations=1).learn()
    assert t.rows[0]["clip_fraction"] is None  # it holds nothing that anybody knows of
    t.save(tmp_path / "x")
    said = t.generate(["w3 w4"])
    from rlhf_notes.formulas import grpo
    del grpo.POLICY_VARIANTS[own_variant]
    again = RLHF.load(tmp_path / "x")
    assert again.generate(["w3 w4"]) == said and again.config.variant == own_variant
    with pytest.raises(ValueError, match="^variant must be one of ppo, .* or registered, got mine"):
        RLHF.load(tmp_path / "x", ["w3"], count)


def test_an_objective_sees_entropy_lengths_and_group(own_variant):
    seen = []
    def objective(r, A, logp, mask, low, high, entropy, lengths, group, logp_old):
        seen.append((entropy.shape, lengths.tolist(), group))
        return r * A
    register_variant(own_variant, objective, "prompt-mean")
    row = own(reward=count, variant=own_variant, iterations=1, microbatches=2).iterate()
    assert seen[0][0][1] == SMALL["max_new_tokens"] and seen[0][2] == 4
    assert row["grad_norm"] > 0


def test_an_advantage_of_ones_own_takes_the_place_of_grpos():
    def same(rewards, mask): return group_advantage(rewards, mask=mask)
    ours, theirs = (own(reward=count, iterations=2, **options).learn()
                    for options in (dict(), dict(advantage=same)))
    assert without_times(ours.rows) == without_times(theirs.rows)
    parts = own(reward=count, iterations=2, microbatches=2, advantage=same).learn()
    assert parts.rows[1]["policy_loss"] == pytest.approx(theirs.rows[1]["policy_loss"], abs=1e-5)
    for options, words in ((dict(advantage="std"), "advantage must be a function"),
                           (dict(advantage=same, algo="ppo"), "advantage must be a function, for")):
        with pytest.raises(ValueError, match=f"^{words}"): own(reward=count, **options)
    with pytest.raises(ValueError, match="^advantage must return a tensor of the shape"):
        own(reward=count, advantage=lambda rewards, mask: rewards[:, :1]).iterate()


def test_prompts_that_end_a_text_are_said():
    with pytest.warns(UserWarning, match="1 of 2 prompts end with a token that ends a text, w3 w2"):
        own(prompts=["w3 w2", "w4"], reward=count)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own(prompts=["w3", "w4"], reward=count)


@pytest.mark.parametrize("teacher, error", [("nope", ValueError), ("./nope", ValueError),
                                            (3, TypeError), (["nope"], TypeError)])
def test_a_teacher_that_is_none_is_told_by_its_own_name(teacher, error):
    small = {k: v for k, v in SMALL.items() if k != "kl_coef"} | dict(iterations=1)
    with pytest.raises(error, match="^teacher must be a .*, got .*(nope|3)"):
        RLHF(make("GPT2"), tokenizer(), ["w3"], teacher=teacher, **small)


@pytest.mark.parametrize("rows", [["w3 w4", "w5"], ["w3 END", "w5"], ["w5", "w3 END"]])
def test_an_end_that_the_tokenizer_adds_is_not_part_of_the_prompt(rows):
    from tokenizers.processors import TemplateProcessing
    t = tokenizer()
    rows = [row.replace("END", t.eos_token) for row in rows]
    end = t.eos_token, t.eos_token_id
    t.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"w1 $A {end[0]}", special_tokens=[("w1", 1), end])
    assert t(rows[1])["input_ids"][-1] == end[1]
    got = [RLHF(make("GPT2"), x, rows, lambda prompts, responses: [0.0] * len(responses),
                **SMALL).task.encode([dict(prompt=p) for p in rows]) for x in (t, tokenizer())]
    for x, y in zip(*got): torch.testing.assert_close(x, y)


def test_a_teacher_with_other_tokens_is_refused(tmp_path):
    from transformers import PreTrainedTokenizerFast
    torch.manual_seed(1)
    same = tokenizer()
    words = dict(same.get_vocab())
    swapped = {w: {7: 8, 8: 7}.get(i, i) for w, i in words.items()}
    from tokenizers import Tokenizer, models, pre_tokenizers
    raw = Tokenizer(models.WordLevel(swapped))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    other = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=same.eos_token)
    small = {k: v for k, v in SMALL.items() if k != "kl_coef"} | dict(iterations=1)
    def student(name):
        return RLHF(make("GPT2"), tokenizer(), ["w3"], teacher=tmp_path / name, **small)
    for name, its in (("same", same), ("other", other), ("bare", None)):
        make("GPT2").save_pretrained(tmp_path / name)
        if its is not None: its.save_pretrained(tmp_path / name)
    for name in ("same", "bare"): assert student(name).learn().rows[0]["kl_k1"] < 1
    message = "^teacher must have the model's tokens, got (7 as the number of 'w8', which is 8|8 "
    message += "as the number of 'w7', which is 7) to the model"
    with pytest.raises(ValueError, match=message): student("other")


class Mute(Exception):
    "An error without a text."
    def __str__(self): raise RuntimeError("no text")
    __repr__ = __str__


class Exits(Mute):
    def __str__(self): raise SystemExit(3)


@pytest.mark.parametrize("error", [Mute, Exits])
def test_an_error_without_a_text_is_told_by_its_kind(error):
    def raises(prompts, responses): raise error
    for more in ({}, dict(reward_timeout=9.0)):
        with pytest.raises(ValueError, match=f"^reward must .* got nothing .{error.__name__}, "):
            own(reward=raises, **more).iterate()
    def texts(prompts, responses): return error()
    for name in ("environment", "hint"):
        with pytest.raises(ValueError, match=f"^{name} must return .* got a {error.__name__}"):
            own(reward=count, kl_coef=None, **{name: texts}).iterate()
    with pytest.raises(ValueError, match=f"^reward must return .* got a {error.__name__} "):
        own(reward=texts).iterate()


CHANGES = [lambda: torch.set_default_dtype(torch.float64),
           lambda: torch.set_default_device("meta"),
           lambda: torch.set_grad_enabled(False), lambda: torch.set_num_threads(2),
           lambda: torch.use_deterministic_algorithms(True),
           lambda: torch.set_autocast_enabled("cpu", True),
           lambda: torch.set_float32_matmul_precision("medium")]


def settings():
    return [torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(),
            torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"),
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()]


@pytest.mark.parametrize("where", ["reward", "async", "environment", "hint", "callback"])
def test_what_users_code_sets_for_all_of_pytorch_is_put_back(where):
    def changes():
        for change in CHANGES: change()
    def reward(prompts, responses):
        if where == "reward": changes()
        return count(prompts, responses)
    async def other(prompts, responses): return reward(prompts, responses)
    def replies(prompts, responses):
        if where in ("environment", "hint"): changes()
        return [None] * len(responses)
    def callback(trainer, row):
        if where == "callback": changes()
    def rows():
        more = {where: replies, "kl_coef": None} if where in ("environment", "hint") else {}
        judge = other if where == "async" else reward
        return without_times(own(reward=judge, iterations=2, **more).learn(callback).rows)
    before = settings()
    found, where, kind = rows(), "", where
    assert settings() == before
    if kind not in ("environment", "hint"):
        assert found == rows()


@pytest.mark.parametrize("reward", [
    lambda **known: [float(len(r)) for r in known["responses"]],
    lambda **known: [float(len(r)) for r in known["completions"]],
    lambda prompts, **known: [float(len(r)) for r in known["responses"]],
    lambda completions, **known: [float(len(r)) for _, r in zip(known["prompts"], completions)],
    lambda **known: [float(len(r)) for _, r in zip(known["completion_ids"], known["responses"])],
])
def test_a_reward_may_take_all_by_their_names(reward):
    plain = own(reward=lambda p, r: [float(len(x)) for x in r]).iterate()
    assert own(reward=reward).iterate()["score"] == plain["score"]
    seen = []
    def judge(p, r, **columns): return seen.append(sorted(columns)) or [0.0] * len(r)
    own(prompts=[dict(prompt="w3", n=1)], reward=judge).iterate()
    assert seen == [["n"]]


@pytest.mark.parametrize("method, options", [
    ("loss", dict(observation_coef=0.1, environment=lambda prompts, responses: ["w5"] * 16)),
    ("draw", dict(dynamic_sampling=True)), ("rate", dict(learning_rate=lambda left: 1e-3 * left)),
    ("reference_logp", dict(hint=lambda prompts, responses: ["w5"] * 16, kl_coef=None))])
def test_an_option_drops_no_method_of_a_loop_of_ones_own(method, options):
    called = []

    def mine(loop, *args):
        called.append(method)
        return getattr(Loop, method)(loop, *args)
    class Own(RLHF): LOOP = type("Mine", (Loop,), {method: mine})
    def train(**more):
        common = SMALL | dict(prompts=["w3 w4"], reward=count, iterations=1) | more
        return Own(make("GPT2"), tokenizer(), **common).iterate()
    train()
    assert called
    name = [*options][0]
    with pytest.raises(ValueError, match=f"^{name} must be .* with a LOOP that has a {method}"):
        train(**options)


def test_a_loop_of_ones_own_is_that_of_pairs_too():
    "A rate that is a function takes the place of the loop's own, but of no user's."
    class Mine(DPOLoop):
        def rate(self): return super().rate() / 2
    class Own(DPO): LOOP = Mine
    rows = [dict(prompt="w3", chosen="w5", rejected="w6")]
    small = dict(batch=1, minibatches=1, max_new_tokens=3, iterations=2)
    halved, plain = (kind(make("GPT2"), tokenizer(), rows, learning_rate=1e-3, **small).iterate()
                     for kind in (Own, DPO))
    assert halved["learning_rate"] == plain["learning_rate"] / 2
    with pytest.raises(ValueError, match="^learning_rate must be .* LOOP that has a rate"):
        Own(make("GPT2"), tokenizer(), rows, learning_rate=lambda left: left, **small)


@pytest.mark.parametrize("name", ["lr_anneal", "lr_warmup"])
def test_a_rate_that_is_a_function_is_not_shaped_by_an_option(name):
    given = {"learning_rate": lambda left: 0.1 * left, name: 2}
    rows = [dict(prompt="w3", chosen="w5", rejected="w6")]
    for build in (lambda: own(reward=count, **given),
                  lambda: DPO(make("GPT2"), tokenizer(), rows, **given)):
        with pytest.raises(ValueError, match=f"^{name} must be left out where learning_rate is a"):
            build()


def test_prompts_in_the_place_of_a_column_are_told(recwarn):
    "What comes after responses by their name may be meant as a column."
    def graded(completions, answer): return [float(a in c) for a, c in zip(answer, completions)]
    def told(p, completions): return count(p, completions)
    own(reward=graded, prompts=[dict(prompt="w3", answer="w9")]).iterate()
    own(reward=told).iterate()
    assert not [w for w in recwarn if "gets the prompts" in str(w.message)]
    for reward in (graded, lambda responses, answer, **others: [0.0] * len(responses)):
        with pytest.warns(UserWarning, match="^reward: the argument 'answer' gets the prompts, wh"):
            own(reward=reward)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_a_training_has_gradients_whatever_surrounds_it(around):
    t, same = (own(reward=count) for _ in range(2))
    with around():
        t.learn()
    same.learn()
    assert without_times(t.rows) == without_times(same.rows)
    weights = (torch.cat([p.detach().flatten() for p in x.policy.parameters()]) for x in (t, same))
    assert torch.equal(*weights)


def test_a_beginning_that_is_added_to_one_in_the_text_is_said():
    with pytest.warns(UserWarning, match="1 of 2 prompts begin with w1 twice"):
        own(prompts=["w1 w3", "w4"], reward=count)


def test_contents_that_a_template_prints_as_python_are_refused():
    parts = [[dict(role="user", content=[dict(type="text", text="w3")])]]
    with pytest.raises(ValueError, match="^prompts must have texts as contents for a template"):
        own(prompts=parts, reward=count, tok=tokenizer(CHATML.replace("m['content']",
                                                                      "m['content']|string")))


def test_a_reward_model_without_a_directory_wants_its_tokenizer():
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from rlhf_notes.hub.load import Classifier
    lm = LlamaForSequenceClassification(LlamaConfig(
        vocab_size=37, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_labels=1, pad_token_id=None))
    with pytest.raises(ValueError, match="^reward must come with its tokenizer, Classifier"):
        own(reward=lm)
    own(reward=Classifier(lm, tokenizer=tokenizer()), iterations=1).iterate()
