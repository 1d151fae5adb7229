"The lesson's lines for other engines, called as each engine calls its hook."

import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from bridges.agreement import batch

from rlhf_notes import policy_loss

LESSON = Path(__file__).parents[2] / "nbs" / "bridges" / "45_scale.ipynb"


def fake(put, name, **content):
    "A module of an engine that is not installed, with what the lines import from it."
    for i in range(name.count(".") + 1):
        part = ".".join(name.split(".")[: i + 1])
        put.setitem(sys.modules, part, ModuleType(part))
    vars(sys.modules[name]).update(content)


def lines(engine):
    "What the lines of the lesson define, by name."
    (cell,) = (c for c in json.loads(LESSON.read_text())["cells"] if c["id"] == "others-md")
    found = re.findall(r"```python\n# (\S+):.*?\n(.*?)```", "".join(cell["source"]), re.S)
    exec(dict(found)[engine], names := dict(policy_loss=policy_loss, torch=torch))
    return names


@pytest.fixture
def given():
    "Log-probabilities, old ones, advantages and mask; a leaf that gets the gradient."
    logp, old, A, mask, _ = batch(0)
    return logp.requires_grad_(), old, A, mask


def equal(loss, logp, expected):
    "Value and gradient."
    (ours,) = torch.autograd.grad(loss, logp, retain_graph=True)
    (other,) = torch.autograd.grad(expected, logp)
    torch.testing.assert_close((loss, ours), (expected, other))
    assert ours.abs().max() > 1e-3


def rows(x, mask):
    return [r[m] for r, m in zip(x, mask)]


def test_skyrl(given, monkeypatch):
    "Its advantages are divided by the tokens of the minibatch; a microbatch is summed."
    logp, old, A, mask = given
    registry = {}
    register = SimpleNamespace(register=registry.__setitem__)
    fake(monkeypatch, "skyrl.backends.skyrl_train.utils.ppo_utils", PolicyLossRegistry=register)
    lines("SkyRL")
    config = SimpleNamespace(eps_clip_low=0.2, eps_clip_high=0.28)
    call = lambda r: registry["rlhf_notes_dapo"](
        logp[r], old[r], A[r] / mask.sum(), config=config, loss_mask=mask[r].float(),
        rollout_logprobs=None)
    found = [call(slice(0, 3)), call(slice(3, 8))]
    assert all(isinstance(x, float) for _, stats in found for x in stats.values())
    equal(found[0][0] + found[1][0], logp, policy_loss(logp, old, A, mask, "dapo")[0])


def test_prime_rl(given, monkeypatch):
    "One sequence, a sum."
    logp, old, A, mask = given
    outputs = lambda loss, metrics: SimpleNamespace(loss=loss, metrics=metrics)
    fake(monkeypatch, "prime_rl.trainer.rl.loss", LossOutputs=outputs)
    ours = lines("prime-rl")["ours"]
    found = [
        ours(SimpleNamespace(trainer_logprobs=a, inference_logprobs=b, ref_logprobs=None,
                             advantages=c, loss_mask=m, loss_weights=None)).loss
        for a, b, c, m in zip(logp, old, A, mask)
    ]
    equal(sum(found) / mask.sum(), logp, policy_loss(logp, old, A, mask, "cispo")[0])


def test_slime(given, monkeypatch):
    "Lists with a tensor for each sample; the sum over samples of their means."
    logp, old, A, mask = given

    def read(logits, *, args, unconcat_tokens, total_lengths, response_lengths):
        return torch.empty(0), dict(log_probs=rows(logits, mask))

    name = "slime.backends.megatron_utils.loss"
    fake(monkeypatch, name, get_log_probs_and_entropy=read)
    ones = [torch.ones(int(n)) for n in mask.sum(1)]
    given = dict(log_probs=rows(old, mask), advantages=rows(A, mask), loss_masks=ones,
                 unconcat_tokens=None, total_lengths=None, response_lengths=None)
    loss, stats = lines("slime")["ours"](None, given, logp, sum)
    assert all(x.ndim == 0 for x in stats.values())
    equal(loss / len(logp), logp, policy_loss(logp, old, A, mask, "gspo")[0])


def test_nemo_rl(given, monkeypatch):
    "The first token has no log-probability; the divisor is that of all microbatches."
    logp, old, A, mask = given
    kinds = dict(LossType=SimpleNamespace(TOKEN_LEVEL=1), LossInputType=SimpleNamespace(LOGPROB=2))
    fake(monkeypatch, "nemo_rl.algorithms.loss.interfaces", **kinds)
    first = lambda x: torch.cat([x[:, :1], x], 1)
    data = dict(token_mask=first(mask).float(), sample_mask=torch.ones(len(logp)),
                prev_logprobs=first(old), advantages=first(A))
    loss, stats = lines("NeMo-RL")["Ours"]()(
        data=data, global_valid_seqs=torch.tensor(8), global_valid_toks=mask.sum() * 2,
        next_token_logprobs=logp)
    assert all(isinstance(x, float) for x in stats.values())
    equal(loss * 2, logp, policy_loss(logp, old, A, mask, "dapo")[0])


def test_tinker(given):
    "A list of log-probabilities; a sum. With the package installed, its own client calls ours."
    logp, old, A, mask = given
    ours, parts = lines("Tinker")["ours"], rows(logp, mask)
    made = lambda x: SimpleNamespace(to_torch=lambda: x)
    data = [SimpleNamespace(loss_fn_inputs=dict(logprobs=made(a), advantages=made(b)))
            for a, b in zip(rows(old, mask), rows(A, mask))]
    loss, stats = ours(data, parts)
    assert all(isinstance(x, float) for x in stats.values())
    equal(loss / mask.sum(), logp, policy_loss(logp, old, A, mask, "dapo")[0])


def test_tinkers_own_client_calls_ours(given):
    types = pytest.importorskip("tinker", exc_type=ImportError).types
    from tinker.lib.public_interfaces.training_client import TrainingClient

    logp, old, A, mask = given
    tensor, ints = types.TensorData.from_torch, types.ModelInput.from_ints
    data, outputs = [], []
    for a, b, c in zip(*(rows(x.detach(), mask) for x in (logp, old, A))):
        target = tensor(torch.zeros(len(a), dtype=torch.int64))
        inputs = dict(target_tokens=target, logprobs=tensor(b), advantages=tensor(c))
        data.append(types.Datum(model_input=ints([0] * len(a)), loss_fn_inputs=inputs))
        outputs.append(dict(logprobs=tensor(a)))
    result = SimpleNamespace(loss_fn_outputs=outputs)
    sent = TrainingClient._compute_custom_loss(data, lines("Tinker")["ours"], result).data
    loss = policy_loss(logp, old, A, mask, "dapo", total=1)[0]
    (grad,) = torch.autograd.grad(loss, logp)
    weights = [-d.loss_fn_inputs["weights"].to_torch() for d in sent]
    torch.testing.assert_close(weights, rows(grad, mask))
