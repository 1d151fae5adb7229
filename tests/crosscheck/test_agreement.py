"""Every quantity that a peer computes too: value and gradient on the same random tensors, equal to
1e-5, or different exactly where it is written down. A peer that is not installed is skipped.
"""
import math
import sys
from types import ModuleType

import pytest
import torch
from crosscheck import peers
from crosscheck.peers import (
    DIFFERENT,
    PEERS,
    QUANTITIES,
    TOLERANCE,
    VERSIONS,
    compare,
    load_peer,
    random_batch,
)
from strategies import value_and_grad

from rlhf_notes.formulas.grpo import off_policy_sequence_mask, policy_loss
from rlhf_notes.formulas.logprob import gaussian_log_prob

SEEDS = range(5)
CELLS = [(q, p) for q, quantity in QUANTITIES.items() for p in quantity.theirs]
LABELS = {  # where a difference is the same number for every batch
    ("value loss", "sb3"): "× 2.00", ("GRPO, an empty response", "trl"): "× 0.88",
    ("whitening", "sb3"): "× 0.99", ("whitening", "verl"): "× 0.99",
    **{(q, p): "NaN" for q, p in DIFFERENT if "impossible" in q or "NaN" in q or "nothing" in q},
    **{(q, p): "gradient NaN" for q, p in DIFFERENT if "log-ratio of 100" in q},
}


def functions_of(name):
    """The functions of a peer. Not installed: the test is skipped. Installed and not to be loaded:
    that is a failure.
    """
    peer = load_peer(name)
    if peer.version is None: pytest.skip(f"{peer.name} is not installed")
    assert peer.missing is None, f"{peer.name} {peer.version} {peer.missing}"
    return peer.functions


@pytest.mark.parametrize("name", PEERS)
def test_peer_is_there(name, request):
    if PEERS[name] in request.config.getoption("--expect", default="").split(","):
        assert load_peer(name).version == VERSIONS[
            name], f"{PEERS[name]} {VERSIONS[name]} is expected, got {load_peer(name).version}"
    functions_of(name)


@pytest.mark.parametrize("quantity, name", CELLS, ids=lambda v: v.replace(" ", "_"))
def test_agrees_or_differs_as_written(quantity, name):
    functions_of(name)
    for seed in SEEDS:
        c = compare(quantity, name, seed)
        if (quantity, name) not in DIFFERENT:
            assert (c.value <= TOLERANCE
                    and c.gradient <= TOLERANCE), (f"seed {seed}: {c.label}; values {c.value}, "
                                                   f"gradients {c.gradient} apart")
        else:
            assert not (c.value <= TOLERANCE
                        and c.gradient
                        <= TOLERANCE), (f"seed {seed}: the two agree now; DIFFERENT says: "
                                        f"{DIFFERENT[quantity, name][1]}")
            if (quantity, name) in LABELS: assert c.label == LABELS[quantity, name]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_kl_times_the_ratio_is_trls(seed):
    lib, b = functions_of("trl"), random_batch(seed)
    args = b.logp_old, b.response_advantage, b.mask
    losses = (lambda x: policy_loss(x, *args, "grpo", b.logp_ref, 0.5, kl_weighted=True)[0],
              lambda x: peers.trl_loss(lib, x, *args, b.logp_ref, 0.5, kl_weighted=True)[0])
    torch.testing.assert_close(*(value_and_grad(f, b.logp) for f in losses), rtol=1e-5, atol=1e-6)


def test_what_is_written_down_is_compared():
    assert set(DIFFERENT) <= set(CELLS)
    assert {p for _, p in CELLS} == set(PEERS) == set(VERSIONS)


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_ours_is_finite_and_the_comparison_notices_a_difference(quantity, monkeypatch):
    """A stand-in peer that returns our own result agrees; one whose result or whose gradient is 0.1
    % off does not.
    """
    q = QUANTITIES[quantity]
    offs = {"=": q.ours, "value": lambda b: q.ours(b) * 1.001 + 1e-4,
            "gradient": lambda b: q.ours(b).detach() + 1.1 * (q.ours(b) - q.ours(b).detach())}
    for off, f in offs.items():
        monkeypatch.setitem(
            QUANTITIES, quantity, q._replace(theirs={"me": lambda lib, b, f=f: f(b)}))
        monkeypatch.setattr(peers, "load_peer", lambda name: peers.Peer(name, "1", object(), None))
        c = compare(quantity, "me")
        assert c.ours.isfinite().all()
        if off == "gradient" and not q.wrt: continue
        # the right gradient is 0 everywhere
        still = off == "gradient" and quantity in ("policy loss, nothing counts",)
        assert (c.label == "=") == (off == "=" or still), (off, c.label)


def _slopes_elsewhere(y): return lambda b: y(b).detach() + y(b).flip(0) - y(b).flip(0).detach()
def _sigma(change): return lambda b: gaussian_log_prob(b.action, b.mu, change(b.sigma))


@pytest.mark.parametrize("quantity, theirs, label", [
    ("log-probability",
     lambda b: QUANTITIES["log-probability"].ours(b) + 2e-4 * (torch.arange(56) == 3).view(8, 7),
     "× 1.0000"),
    ("value transform", _slopes_elsewhere(QUANTITIES["value transform"].ours), "gradient"),
    ("log-probability, Gaussian", _sigma(lambda s: s.detach() + 1.1 * (s - s.detach())),
     "gradient"),
    ("log-probability, Gaussian", _sigma(lambda s: s + (0 * s).sqrt()), "gradient NaN")])
def test_one_number_is_enough(quantity, theirs, label, monkeypatch):
    """A stand-in peer that is off in one value, in the places of its gradient or in the second of
    two gradients.
    """
    monkeypatch.setitem(QUANTITIES, quantity,
                        QUANTITIES[quantity]._replace(theirs={"me": lambda lib, b: theirs(b)}))
    monkeypatch.setattr(peers, "load_peer", lambda name: peers.Peer(name, "1", object(), None))
    assert compare(quantity, "me").label == label


def test_a_module_is_loaded_alone_and_leaves_no_trace(tmp_path, monkeypatch):
    (tmp_path / "toy" / "sub").mkdir(parents=True)
    (tmp_path / "toy" / "sub"
     / "part.py").write_text("from heavy.deep import Thing, other\nvalue = Thing")
    for path in ("toy", "toy/sub"): (tmp_path / path / "__init__.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "heavy", before := ModuleType("heavy"))
    assert peers.alone("toy", ["sub.part"], {"heavy.deep": {"Thing": 7}})["part"].value == 7
    assert sys.modules["heavy"] is before
    assert not [m for m in sys.modules if m.split(".")[0] == "toy" or m == "heavy.deep"]


def test_a_missing_peer_is_reported(monkeypatch):
    monkeypatch.setitem(PEERS, "absent", "no-such-library-of-that-name")
    peer = load_peer("absent")
    assert peer.version is None and peer.functions is None and peer.missing == "not installed"
    monkeypatch.setitem(
        QUANTITIES, "k1", QUANTITIES["k1"]._replace(theirs={"absent": lambda l, b: 1 / 0}))
    assert compare("k1", "absent") is None


def test_a_peer_that_is_installed_and_broken_is_not_missing(monkeypatch):
    monkeypatch.setitem(PEERS, "broken", "torch")
    monkeypatch.setattr(peers, "_load_broken", lambda: 1 / 0, raising=False)
    peer = load_peer("broken")
    assert peer.version and peer.missing.startswith("cannot be loaded: ZeroDivisionError")


@pytest.mark.parametrize(
    "package, name",
    [("torchtune", "torchtune"), ("ding", "ding"), ("verl", "verl"), ("openrlhf", "openrlhf")])
def test_loading_leaves_no_trace(package, name):
    functions_of(name)
    load_peer.__wrapped__(name)
    assert not [m for m in sys.modules
                if m.split(".")[0] in (package, "omegaconf", "tensordict", "deepspeed", "ray")]


def test_the_batch_is_worth_comparing_on():
    """Real and padded tokens, clipped and unclipped ratios of both signs, terminated and truncated
    steps in each batch.
    """
    for seed in SEEDS:
        b = random_batch(seed)
        r = (b.logp - b.logp_old).exp()
        assert b.mask.any(1).all() and not b.mask.all() and (b.mask.sum(1) == b.lengths).all()
        for sign in (1, -1):
            A = b.advantage * sign > 0
            assert (A & (r > 1.3)).any()
            assert (A & (r < 0.8)).any()
            assert (A & ((r - 1).abs() < 0.2)).any()
        assert b.terminated.any() and (b.truncated & ~b.terminated).any() and not b.done.all()
        assert (b.logp <= 0).all()
        assert (b.logp_old <= 0).all()
        assert math.isfinite(sum(x.sum().item() for x in vars(b).values()))
        assert torch.equal(random_batch(seed).logits, b.logits)
        assert not torch.equal(random_batch(seed + 1).logits, b.logits)


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.3])
def test_the_off_policy_mask_is_that_of_trl(threshold):
    trl = functions_of("trl")
    kept = []
    for seed in SEEDS:
        b = random_batch(seed)
        A = b.advantage[:, 0]
        keep = off_policy_sequence_mask(b.logp, b.logp_old, A, threshold, b.mask)
        assert torch.equal(
            keep,
            trl.grpo.GRPOTrainer.get_off_policy_mask(A[:, None], b.logp, b.logp_old, b.mask.float(),
                                                     threshold).bool())
        kept.append(keep)
    assert not torch.cat(kept).all() and torch.cat(kept).any()
