"What torch.export and torch.jit.trace write down holds for other numbers of steps and rows."
import pytest
import torch
from strategies import normal, random_mask
from torch.export import Dim

import rlhf_notes as rn
from rlhf_notes import fast

def steps(T, seed=0):
    "Rewards, two values and two kinds of ends, (T, 4)."
    rows = [normal(seed + i, (T, 4)) for i in range(3)]
    return *rows, random_mask(seed + 3, (T, 4), 0.2), random_mask(seed + 4, (T, 4), 0.3)


def logits(T, seed=0):
    return normal(seed, (T, 4, 600)), torch.arange(4 * T).reshape(T, 4) * 7 % 600


FORMULAS = {  # function, arguments for a number of steps
    "gae": (rn.gae, steps),
    "discounted_returns": (lambda r, d: rn.discounted_returns(r, d, 0.9),
                           lambda T, seed=0: steps(T, seed)[::4]),
    "gae_tokens": (lambda r, v, m: rn.gae_tokens(r.T, v.T, m.T),
                   lambda T, seed=0: steps(T, seed)[1:4]),
    "reinforce_pp_advantage": (lambda r, m: rn.reinforce_pp_advantage(r.T, m.T, 0.9),
                               lambda T, seed=0: steps(T, seed)[2:4]),
    "whiten": (rn.whiten, lambda T, seed=0: steps(T, seed)[2:4]),
    "selective_log_softmax": (rn.selective_log_softmax, logits),
    "entropy_from_logits": (rn.entropy_from_logits, lambda T, seed=0: logits(T, seed)[:1]),
}


def exported(f, args):
    free = tuple({0: Dim("T", min=3)} for _ in args)
    class Module(torch.nn.Module):
        def forward(self, *args): return f(*args)
    return torch.export.export(Module(), args, dynamic_shapes=(free,)).module()


def traced(f, args): return torch.jit.trace(f, args, check_trace=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("record", [exported, traced])
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("T", [3, 300])
def test_the_number_of_steps_stays_free(name, record, T):
    f, args = FORMULAS[name]
    program = record(f, args(T))
    for other in (3, 5, T + 1):
        given = args(other, seed=20)
        torch.testing.assert_close(program(*given), f(*given), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_a_program_of_the_plain_code_says_that_its_steps_are_fixed():
    with fast.off():
        with pytest.raises(Exception, match="dynamic but your code specialized"):
            exported(rn.gae, steps(8))
        program = traced(rn.gae, steps(8))
        torch.testing.assert_close(program(*steps(8, 20)), rn.gae(*steps(8, 20)))
        with pytest.raises(RuntimeError, match="TorchScript"):
            program(*steps(9))


@pytest.mark.filterwarnings("ignore")
def test_onnx_says_that_it_has_no_such_operator(tmp_path):
    pytest.importorskip("onnxscript")
    class Module(torch.nn.Module):
        def forward(self, *args): return rn.gae(*args)
    with pytest.raises(Exception, match="rlhf_notes.scan"):
        torch.onnx.export(Module(), steps(8), tmp_path / "gae.onnx", dynamo=True)
