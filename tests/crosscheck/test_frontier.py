"""The formulas that TRL has too and the table of lesson 32 has not: value and gradient on the same
random tensors. Without TRL they are skipped."""
import importlib
import warnings

import pytest
import torch
from strategies import normal, random_mask, value_and_grad

import rlhf_notes as rn

SEEDS = range(5)


def trl(module):
    "A module of TRL, which warns that some are experimental."
    pytest.importorskip("trl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"trl.{module}")


def same(ours, theirs, *tensors):
    "Value and gradients of both agree."
    (a, slopes), (b, expected) = value_and_grad(ours, *tensors), value_and_grad(theirs, *tensors)
    torch.testing.assert_close((a, slopes), (b, expected), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind, beta, theirs", [
    ("reverse", 0.5, 1.0), ("forward", 0.5, 0.0), ("jsd", 0.5, 0.5), ("jsd", 0.1, 0.1)])
def test_distillation_is_trls(kind, beta, theirs, seed):
    loss = trl("experimental.gkd.gkd_trainer").GKDTrainer.generalized_jsd_loss
    s, t, m = normal(seed, (2, 4, 7)), normal(seed + 9, (2, 4, 7)), random_mask(seed, (2, 4))
    labels = torch.where(m, 1, -100)
    same(lambda s: rn.distillation_loss(s, t, m, kind, beta, 0.7),
         lambda s: loss(s, t, labels, beta=theirs, temperature=0.7), s)
