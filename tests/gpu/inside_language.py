"""RLHF on a GPU: metrics of the CPU in every stage, in two precisions, on either device, through a
resumption, and from a graph.
"""
from dataclasses import asdict, replace

import pytest
import torch
from fast.test_steps import KINDS
from fast.test_steps import make as make_decoder
from language_models import make, tokenizer
from pretend import STATE, counted, inner, on_cpu, to_gpu
from same import assert_rows

from rlhf_notes import RLHF
from rlhf_notes.language.model import autocast, make_gpt2
from rlhf_notes.language.sampling import draw, sample
from rlhf_notes.reviews import pipeline
from rlhf_notes.reviews.config import ReviewsConfig
from rlhf_notes.training.runs import Run

SMALL = dict(sft_steps=3, labels=32, norm_samples=16, iterations=2, batch=16, minibatches=2,
             eval_responses=16, eval_every=1)


slow = pytest.mark.slow  # `make test-all` alone
second = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no second GPU")


def config(**changes): return ReviewsConfig(**SMALL | changes)


@pytest.mark.parametrize("algo", [pytest.param("ppo", marks=slow), "grpo"])
def test_float32_gives_the_metrics_of_the_cpu(algo, tmp_path):
    c = config(algo=algo, device="cuda", kl_in_loss=algo == "grpo")
    before = STATE.recorded
    trainer, rows, summary = pipeline.train(
        pipeline.Training(c), Run.create(tmp_path / "run", {"task": "rlhf", **asdict(c)}))
    assert trainer.device.type == "cuda"
    assert summary["device"] == "cuda:0"
    assert not summary["interrupted"]
    assert STATE.recorded == before + 1  # its step, once
    assert_rows(rows, pipeline.train(pipeline.Training(replace(c, device="cpu")))[1])
    from transformers import AutoModelForCausalLM
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy")
    for p, q in zip(back.parameters(), trainer.policy.lm.parameters(), strict=True):
        assert torch.equal(p, inner(q))


@pytest.mark.parametrize("algo", ["ppo", pytest.param("grpo", marks=slow)])
def test_bfloat16_is_as_near_to_the_cpu_as_bfloat16_is(algo):
    rows = [pipeline.train(pipeline.Training(config(algo=algo, precision="bfloat16", device=d,
                                                    iterations=1)))[1][0] for d in ("cuda", "cpu")]
    assert_rows(*([{k: row[k] for k in ("score", "kl_k1", "entropy", "ratio", "approx_kl")}]
                  for row in rows), 0.1)


@slow
@second
def test_the_second_gpu_computes_by_itself(recwarn):
    """The first stays the current one: streams, graphs and kernels have to be asked for on the
    second.
    """
    c = config(device="cuda:1")
    trainer, rows, _ = pipeline.train(pipeline.Training(c))
    assert str(trainer.device) == "cuda:1"
    assert torch.cuda.current_device() == 0
    assert STATE.outside == 0
    assert not [w for w in recwarn if "Graph" in str(w.message)]
    assert_rows(rows, pipeline.train(pipeline.Training(replace(c, device="cpu")))[1])


def finished(training):
    while training.left: training.iterate()
    return training


@slow
@pytest.mark.parametrize("steps, start, then", [(1, "cuda", "cpu"),
                                                (5, "cpu", "cuda"),
                                                (8, "cpu", "cuda"),
                                                (8, "cuda", "cpu"),
                                                (8, "cuda", "cuda")])
def test_a_training_is_resumed_on_either_device(steps, start, then, tmp_path):
    c = config(device=start, iterations=3)
    training = pipeline.Training(c)
    for _ in range(steps): training.iterate()
    torch.save(training.state_dict(), tmp_path / "state")
    other = pipeline.Training(replace(c, device=then))
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert training.name == other.name == {1: "sft", 5: "reward_model", 8: "rl"}[steps]
    whole, other = finished(training), finished(other)
    assert_rows(other.rows["rl"], whole.rows["rl"], 0 if start == then else 2e-3)
    a, b = ([inner(p) for p in t.stage.policy.parameters()] for t in (whole, other))
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(
            p, q, **dict(rtol=0, atol=0) if start == then else dict(rtol=1e-2, atol=1e-3))


@pytest.mark.parametrize("kind", ["Llama", pytest.param("GPT2", marks=slow)])
def test_a_model_of_transformers_learns_as_on_the_cpu(kind):
    def reward(prompts, responses): return [len(set(r.split())) for r in responses]
    def rows(device, precision="float32", iterations=2):
        options = dict(prompts=["w1 w2 w3", "w4 w5"], reward=reward, max_new_tokens=8, batch=16,
                       minibatches=2, iterations=iterations, precision=precision)
        return RLHF(make(kind), tokenizer(), device=device, **options).learn().rows
    assert_rows(rows("cuda"), rows("cpu"))
    assert rows("cuda", "bfloat16", 1)[0]["score"] == pytest.approx(
        rows("cpu", "bfloat16", 1)[0]["score"], abs=0.5)


def test_dialogues_are_those_of_the_cpu():
    def reward(prompts, responses): return [len(set(r.split())) for r in responses]
    def more(prompts, responses): return [None if "w9" in p else " w9 w8 " for p in prompts]
    def rollout(device):
        lm = make("Llama")
        lm.generation_config.eos_token_id = list(range(20, 37))
        return RLHF(lm, tokenizer(), ["w1 w2 w3", "w4 w5"], reward, environment=more, batch=16,
                    max_new_tokens=8, iterations=1, device=device).learn().rollout
    x, y = rollout("cuda"), rollout("cpu")
    assert torch.equal(x.tokens.cpu(), y.tokens) and torch.equal(x.scores.cpu(), y.scores)
    assert torch.equal(x.response_mask.cpu(), y.response_mask) and x.has_end.any()


# --- sampling from a graph

def texts(B, seed, device, T=7):
    g = torch.Generator().manual_seed(seed)
    prompts, u = torch.randint(50, (B, 5), generator=g), torch.rand(B, T, generator=g)
    mask = torch.arange(5) >= torch.arange(B)[:, None] % 4
    return [x.to(device) for x in (prompts, mask, u)]


def replays(device="cuda", precision="float32", batches=(6, 6, 4, 6, 4), T=7):
    """A graph's samples, those of the same code without one, of weights that have changed in
    between.
    """
    from rlhf_notes.fast import gpt2
    from rlhf_notes.language import sampling
    lm = make_gpt2("tiny", 50, device=device)
    for seed, B in enumerate(batches):
        inputs = texts(B, seed, device, T)
        with autocast(device, precision), torch.no_grad():
            with counted() as found: drawn = sample(lm, *inputs)
            eager = sampling._sample.__wrapped__(lm, *inputs, 1.0)
            assert all(torch.equal(inner(a), inner(b)) for a, b in zip(drawn, eager))
            for p in lm.parameters():
                p.add_(0.02
                       * torch.randn(p.shape,
                                     generator=torch.Generator().manual_seed(seed)).to(device))
    assert len(gpt2._graphs[lm]) == 2 and STATE.outside == 0
    return found


@pytest.mark.parametrize("device", ["cuda", pytest.param("cuda:1", marks=second)])
@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=slow)])
def test_the_graph_gives_the_samples_of_its_code(device, precision):
    found = replays(device, precision)
    assert found.kinds.total() == 1  # is the last column of the mask True?


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=slow)])
@pytest.mark.parametrize("kind", ["llama", *(pytest.param(kind, marks=slow) for kind in KINDS
                                             if kind != "llama")])
def test_a_recorded_step_gives_the_tokens_of_its_code(kind, precision):
    from rlhf_notes.fast import off, steps
    lm = make_decoder(KINDS[kind]).to("cuda")
    for seed in range(3):
        prompts, mask, u = texts(6, seed, "cuda")
        with autocast("cuda", precision), torch.no_grad():
            drawn = sample(lm, prompts, mask, u)
            with off(): plain = sample(lm, prompts, mask, u)
            assert torch.equal(inner(drawn.tokens), inner(plain.tokens))
            torch.testing.assert_close(on_cpu(drawn.logp), on_cpu(plain.logp), atol=1e-5, rtol=1e-5)
            run = steps._steps[lm][1]
            if seed == 0: graph = run.graph
            assert graph is run.graph is not None and STATE.outside == 0
            for p in lm.parameters(): p.add_(0.02)


def test_a_gpu_is_not_waited_for_to_see_that_all_have_ended(monkeypatch):
    from rlhf_notes.language import sampling
    steps, (prompts, mask, _) = [], texts(3, 0, "cuda")
    monkeypatch.setattr(sampling, "draw", lambda *a: steps.append(1) or draw(*a))
    lm, u = make("Llama", vocab_size=50).to("cuda"), to_gpu(torch.rand(3, 20))
    with counted() as alone: sample(lm, prompts, mask, u[:, :1])
    steps.clear()
    with counted() as found: sample(lm, prompts, mask, u, 1.0, list(range(50)))
    assert len(steps) == 1 and found.kinds == alone.kinds


@slow
def test_an_impossible_token_is_not_drawn(monkeypatch):
    "The cumulative sum of a GPU may rise where a probability is 0."
    monkeypatch.setattr(torch, "searchsorted", lambda cdf, x: torch.ones_like(x, dtype=torch.long))
    logits = to_gpu(torch.tensor([[0.0, -torch.inf, 2.0]]))
    assert inner(draw(logits, 1.0, to_gpu(torch.zeros(1)))).tolist() == [2]


def test_with_kernels_inside_the_graph(with_kernels): replays(batches=(6, 4, 6), T=3)


def test_the_gpus_cache_gives_the_samples_of_the_cpus():
    on_gpu = sample(make_gpt2("tiny", 50, device="cuda"), *texts(6, 0, "cuda"))
    torch.testing.assert_close(
        on_cpu(tuple(on_gpu)), tuple(sample(make_gpt2("tiny", 50), *texts(6, 0, "cpu"))), atol=2e-5,
        rtol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_no_row_of_attention_is_without_a_place(precision, monkeypatch):
    "As the memory-efficient kernel of PyTorch 2.4, in which such a row is 0 / 0."
    def attention(q, k, v, mask, scale):
        bias = mask.to(q.dtype).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
        x = ((q @ k.mT).float() * scale + bias.float()) * 1.4426950408889634
        return (x.exp2() / x.exp2().sum(-1, keepdim=True)).to(v.dtype) @ v
    from rlhf_notes.fast import gpt2
    lm, inputs = make_gpt2("tiny", 50, device="cuda"), texts(6, 0, "cuda")
    monkeypatch.setattr(gpt2, "scaled_dot_product_attention", attention)
    with autocast("cuda", precision): assert inner(sample(lm, *inputs).logp).isfinite().all()
