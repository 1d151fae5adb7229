"The pretended GPU itself: it refuses what a GPU refuses, and counts what waits."
import copy
from collections import Counter

import pytest
import torch
from pretend import STATE, counted, inner, on_cpu
from torch import nn

@pytest.mark.parametrize("refused, said", [
    (lambda x: x + torch.randn(3, 4), "same device"),
    (lambda x: torch.stack([x.sum(), torch.tensor(1.0)]), "same device"),
    (lambda x: x + torch.zeros(3, 4, device="cuda:1"), "same device"),
    (lambda x: x.numpy(), "can't convert"),
    (lambda x: torch.randn(3, generator=torch.Generator(), device="cuda"),
     "Expected a 'cuda' device type"),
    (lambda x: torch.randn(3, generator=torch.Generator("cuda")), "Expected a 'cpu' device type"),
])
def test_what_a_device_refuses(refused, said):
    with pytest.raises((RuntimeError, TypeError), match=said): refused(torch.randn(3, 4).to("cuda"))


def test_autograd_and_autocast_as_on_a_cpu():
    net, w = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), torch.randn(7, 4)
    other = copy.deepcopy(net).to("cuda")
    net(w).square().mean().backward()
    other(w.to("cuda")).square().mean().backward()
    torch.testing.assert_close(
        on_cpu([p.grad for p in other.parameters()]), [p.grad for p in net.parameters()])
    assert all(p.is_cuda and isinstance(p, nn.Parameter) for p in other.parameters())
    with torch.autocast("cuda", dtype=torch.bfloat16): y = other(w.to("cuda"))
    assert y.dtype == torch.bfloat16 and y.softmax(-1).device == torch.device("cuda:0")


def test_a_graph_is_replayed_on_its_memory_and_nothing_waits_inside():
    x, w, graph = torch.ones(3, device="cuda"), torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): y = (x * w).cumsum(0)
    w.mul_(2)
    x.fill_(5)
    graph.replay()
    assert inner(y).tolist() == [10, 20, 30] and STATE.graph is None
    with pytest.raises(
        RuntimeError, match="not permitted when stream is capturing"), torch.cuda.graph(graph):
        x.sum().item()


def test_what_waits_is_counted():
    x = torch.randn(3, 4, device="cuda")
    with counted() as found:
        x.sum().item(), x.cpu(), x.tolist(), bool((x > 0).all()), x[x > 0], torch.ones(2).to("cuda")
        torch.tensor([1.0], device="cuda"), torch.cuda.synchronize()
    assert found.kinds == Counter(item=2, D2H=2, nonzero=1, H2D=2, synchronize=1)
