"""The benchmark: it measures what it says, and what it promises about memory holds."""
import os
import time

import pytest
import torch

from rlhf_notes import fast
from rlhf_notes.formulas.logprob import selective_log_softmax
from rlhf_notes.studies import speed

def cases():
    yield from speed.logit_cases((2, 3, 40), torch.float32, "cpu", width=8)
    yield from speed.gae_cases("cpu")


def test_every_contender_computes_the_same():
    for case in list(cases()):
        results = {m: f(*case.inputs) for m, f in case.methods.items() if f}
        assert "ours" in results and len(results) > 1
        for y in results.values():
            for a, b in zip(*(t if isinstance(t, tuple) else (t,) for t in (y, results["ours"]))):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_rows_and_ratios():
    slow = speed.Case("log-probability", (2, 3, 4), torch.float32,
                      {"slow": lambda z: [z.exp() for _ in range(300)][-1].sum(-1),
                       "ours": lambda z: z.exp().sum(-1)},
                      (torch.ones(2, 3, 4, requires_grad=True),), moves=(96, 288))
    object.__setattr__(slow, "leaves", slow.inputs)
    rows = speed.measure(slow, "cpu", 5, 1e9)
    assert [(r["passes"], r["method"]) for r in rows] == [
        (p, m) for p in ("forward", "forward + backward") for m in ("slow", "ours")]
    for r in rows:
        assert tuple(r) == speed.COLUMNS and "," not in "".join(str(v) for v in r.values())
        assert r["times_ours_low"] <= r["times_ours"] <= r["times_ours_high"]
        assert r["times_ours"] == 1 if r["method"] == "ours" else r["times_ours"] > 3
        moved = 96 if r["passes"] == "forward" else 288
        assert r["bandwidth_share"] == pytest.approx(
            moved / (r["milliseconds"] * 1e-3) / 1e9, rel=0.2, abs=2e-4)
    assert len(speed.table(rows)) == 5 and {len(line) for line in speed.table(rows)} == {10}


def test_times_become_ratios_of_the_same_round_shares_and_medians(monkeypatch):
    "By a clock of our own: what is timed, in which order, and what is made of it."
    again = [4.0, 2.0, 6.0, 1.0, 9.0, 3.0, *(4.0, 2.0, 8.0), *(6.0, 1.0, 8.0), *(9.0, 3.0, 8.0)]
    first = [50.0, 10.0, 60.0, 10.0, 70.0, 10.0, *(50.0, 10.0, 20.0), *(60.0, 10.0, 20.0),
             *(70.0, 10.0, 20.0)]
    clock, grads = iter([t for both in zip(first, again) for t in both]), []
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            ctx.z = z
            return z.sum(-1)
        @staticmethod
        def backward(ctx, grad):
            grads.append(grad)
            return torch.zeros_like(ctx.z)
    def timed(f, device):
        f()
        return next(clock)
    def peak(f, device):
        f()
        return 100e6
    monkeypatch.setattr(speed, "seconds", timed)
    monkeypatch.setattr(speed, "peak_extra", peak)
    z, needed = torch.ones(2, 3, 4, requires_grad=True), set()
    def two(z):
        needed.add((x := Sum.apply(z)).requires_grad)
        return x, Sum.apply(z)
    case = speed.Case("both", (2, 3, 4), torch.float32,
                      {"two": two, "ours": Sum.apply, "ours in place": Sum.apply}, (z,), (z,),
                      moves=(60, 120), base=50_000_000,
                      result=(30_000_000, 70_000_000), restore={"ours in place": lambda: None})
    rows = speed.measure(case, "cpu", 3, 5.0)
    assert [r["method"] for r in rows] == ["two", "ours", "two", "ours", "ours in place"]
    assert needed == {False, True}
    for r, moved, extra in zip((rows[0], rows[2]), (60, 120), (70, 30)):
        assert (r["milliseconds"], r["times_ours"], r["times_ours_low"],
                r["times_ours_high"]) == (6000, 3, 2, 6)
        assert r["bandwidth_share"] == moved / 6 / 5
        assert (r["extra_megabytes"], r["extra_share"]) == (extra, extra / 50)
    assert [r["milliseconds"] for r in rows if r["method"] == "ours"] == [2000, 2000]
    # nothing beside the logits holds its gradient
    assert (rows[-1]["milliseconds"], rows[-1]["extra_megabytes"]) == (8000, 100)
    weights = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    # three rounds, twice each, and once for the memory: two, one and one
    assert len(grads) == 28 and all(torch.equal(g, weights) for g in grads)


def test_what_each_case_moves_and_is_asked_for():
    *first, hidden = speed.logit_cases((2, 3, 40), torch.float32, "cpu", width=8)
    assert [(c.moves, c.base, c.result) for c in first] == [((960, 2880), 960, (0, 960))] * 3
    assert (hidden.base, hidden.result) == (960, (0, 4 * 8 * (2 * 3 + 40)))


def test_the_bandwidth_of_a_copy_counts_both_ways_at_its_best(monkeypatch):
    clock = iter([3.0, 2.0, 4.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0])
    monkeypatch.setattr(speed, "seconds", lambda f, device: next(clock))
    assert speed.copy_bandwidth("cpu") == 2 * 2**27 / 2


def test_the_machine(monkeypatch):
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    left = speed._memory_left("cpu")
    assert left == float("inf") or pages / 500 < left <= pages
    monkeypatch.setattr(speed.Path, "read_text",
                        lambda self: "model name\t: A, B and C\nmodel name\t: A, B and C\n")
    assert speed.device_name("cpu") == f"A  B and C ({torch.get_num_threads()} threads)"


def test_the_second_run_in_a_row_counts():
    "What a method pays only when another has run before it does not count."
    last = []
    def who(name):
        def f(z):
            if last[-1:] != [name]: time.sleep(0.05)
            last.append(name)
            return z.sum(-1)
        return f
    case = speed.Case("log-probability", (2, 3, 4), torch.float32,
                      {"a": who("a"), "ours": who("ours")}, (torch.ones(2, 3, 4),))
    assert all(r["milliseconds"] < 25 for r in speed.measure(case, "cpu", 3, 1e9))
    assert last[:12] == ["a", "a", "ours", "ours"] * 3


def test_what_is_short_is_repeated(monkeypatch):
    """Five runs of one millisecond, by a clock of our own, and one of what is long or writes over
    its logits.
    """
    runs, clock = [], {"short": (1e-3, 10e-3), "ours": (7e-3, 4e-3), "over": (1e-3, 2e-3)}
    def method(name): return lambda z: (runs.append(name), z.sum(-1))[1]
    def timed(f, device):
        before = len(runs)
        f()
        turns.append((runs[-1], len(runs) - before))
        return clock[runs[-1]][sum(name == runs[-1] for name, _ in turns[-2:]) - 1]
    turns = []
    monkeypatch.setattr(speed, "seconds", timed)
    z = torch.ones(2, 3, 4, requires_grad=True)
    case = speed.Case("both", (2, 3, 4), torch.float32, {name: method(name) for name in clock},
                      (z,), (z,), restore={"over": lambda: None})
    rows = speed.measure(case, "cpu", 1, 1e9)
    assert turns == [
        ("short", 1), ("short", 5), ("ours", 1), ("ours", 1)] * 2 + [("over", 1), ("over", 1)]
    assert [(r["method"], r["milliseconds"]) for r in rows] == [("short", 2),
                                                                ("ours", 4)] * 2 + [("over", 2)]
    assert rows[0]["times_ours"] == 0.5


def test_what_is_overwritten_is_made_whole_before_each_run():
    """The gradient in place of the logits is timed and computed from whole logits each time,
    backward alone, and no gradient is taken off its memory.
    """
    seen, z, i = [], torch.randn(2, 3, 40, requires_grad=True), torch.randint(40, (2, 3))
    def ours(z, i, inplace_backward=False):
        seen.append((inplace_backward, z.detach().clone()))
        return Overwrite.apply(z) if inplace_backward else z.sum(-1)
    class Overwrite(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            ctx.z = z.detach()
            return z.sum(-1)
        @staticmethod
        def backward(ctx, grad): return ctx.z.fill_(7)
    case = speed._logit_case(
        "log-probability", z, i, {"naive": speed._naive_log_prob, "TRL": None}, ours)
    found = speed.measure(case, "cpu", 3, 1e9)
    assert ([(r["passes"], r["method"]) for r in found]
            == [("forward", m) for m in ("naive", "ours, plain", "ours")]
            + [("forward + backward", m)
               for m in ("naive", "ours, plain", "ours", "ours in place")])
    assert sum(inplace for inplace, _ in seen) == 7
    assert all(torch.equal(logits, z) for _, logits in seen)


def test_ours_in_place_needs_no_gradient_of_its_own():
    case = next(speed.logit_cases((2, 128, 32000), torch.float32, "cpu"))
    def run(name): speed._run_once(case, case.methods[name], torch.ones(2, 128))
    run("ours in place")                                      # compiling takes memory of its own
    extra = speed.peak_extra(lambda: run("ours in place"), "cpu")
    if extra is None: pytest.skip("this system does not say")
    assert extra < 0.25 * case.base < speed.peak_extra(lambda: run("ours"), "cpu")


def test_memory_is_seen():
    torch.ones(2**26).sum()                                   # more than all that follows, and gone
    extra = speed.peak_extra(lambda: torch.ones(2**24).sum() + torch.ones(2**22).sum(), "cpu")
    if extra is None: pytest.skip("this system does not say")
    assert 60e6 < extra < 90e6  # 67 MB, and 17 MB after they were freed


def test_ours_needs_no_second_tensor():
    "The promise: beyond the logits and their gradient, less than 5% of them."
    z, i = torch.randn(600, 32000), torch.zeros(600, dtype=torch.long)
    z.requires_grad_(True)
    extra = speed.peak_extra(
        lambda: torch.autograd.grad(selective_log_softmax(z, i).sum(), z), "cpu")
    if extra is None: pytest.skip("this system does not say")
    assert extra - z.nbytes < 0.05 * z.nbytes


def test_what_does_not_fit_is_left_out(monkeypatch):
    monkeypatch.setattr(speed, "_memory_left", lambda device: 1e6)
    monkeypatch.setattr(speed, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(speed, "gae_cases", lambda device: [])
    said = []
    assert speed.bench(("small",), rounds=1, left_out=said.append) == []
    assert len(said) == 2
    assert "8x128x32000 in float32 is left out" in said[0]


def test_what_is_asked_for_is_timed_where_it_fits(monkeypatch):
    monkeypatch.setattr(speed, "measure", lambda case, *_: [(case.task, str(case.dtype)[6:])])
    monkeypatch.setattr(speed, "copy_bandwidth", lambda device: 1e9)
    said, small = [], ((2, 3, 40),)
    both = [
        (task, dtype) for dtype in ("float32", "bfloat16") for task in ("log-probability", "both")]
    assert speed.bench(small, done=said.extend, tasks=("log-probability", "both")) == said == [
        *both[:2], ("parts", "float32"), *both[2:]]
    assert [task for task, _ in speed.bench(small, tasks=("GAE",))] == ["GAE", "GAE"]
    # bytes; they need 8 times 240 logits of 4 and 3
    for left, dtypes in (
        (9601, ["float32", "bfloat16"]), (9599, ["bfloat16"]), (7201, ["bfloat16"]), (7199, [])):
        monkeypatch.setattr(speed, "_memory_left", lambda device: left)
        assert [dtype for _, dtype in speed.bench(small, tasks=("entropy",))] == dtypes


def test_the_table():
    row = dict(dict.fromkeys(speed.COLUMNS), task="GAE", shape="2x3", dtype="float32",
               passes="forward", method="loop", milliseconds=1.5, times_ours=4,
               extra_megabytes=2.25, extra_share=0.125, bandwidth_share=0.5)
    assert (speed.table([row,
                         row
                         | dict(extra_megabytes=None, extra_share=None, bandwidth_share="")])[1:]
            == [
                ("GAE", "2x3", "float32", "forward", "loop", "1.50", "4.00", "2.2", "12.5%",
                 "50.0%"),
                ("GAE", "2x3", "float32", "forward", "loop", "1.50", "4.00", "", "", "")])


@pytest.mark.parametrize("error", [AttributeError, OSError, StopIteration])
def test_an_error_of_what_is_measured_is_not_swallowed(error):
    def fails(): raise error("mine")
    with pytest.raises(error, match="mine"): speed.peak_extra(fails, "cpu")


@pytest.mark.parametrize("kwargs, words", [
    (dict(sizes=("tiny",)), "sizes must be one of 'quick', 'small', 'medium', 'large', got 'tiny'"),
    (dict(tasks=("gae",)), "tasks must be one of 'log-probability', .* got 'gae'"),
])
def test_bad_input_of_the_benchmark_is_named(kwargs, words):
    with pytest.raises(ValueError, match=words): speed.bench(**kwargs)


def test_the_plain_code_is_timed_with_the_doors_shut(monkeypatch):
    seen = []
    def ours(z, i, inplace_backward=False):
        seen.append(fast.is_open())
        return z.sum(-1)
    case = speed._logit_case("log-probability", torch.randn(2, 3, 4, requires_grad=True),
                             torch.zeros(2, 3, dtype=torch.long), {}, ours)
    for name in ("ours, plain", "ours"): speed._run_once(case, case.methods[name], None)
    assert seen == [False, True]
    assert speed.code_that_runs("cpu") == (
        "Numba loops" if fast.has_numba() else "the plain formulas")
    with fast.off():
        assert speed.code_that_runs("cpu") == "the plain formulas: fast is switched off"


def test_what_exponentials_cost_in_a_loop_is_measured_where_they_are_used():
    case = speed._part_case((2, 4, 65536))
    assert (case.methods["exp2 in the cache, compiled"] is not None) == fast.has_numba()
    for f in filter(None, case.methods.values()): f(*case.inputs)


def test_the_summary_names_the_naive_line_and_the_quickest_of_the_others():
    def row(method, times, task="both", shape="4x1024x128256", low=0.5):
        return dict(task=task, shape=shape, dtype="bfloat16", passes="forward + backward",
                    method=method, milliseconds=20 * times, times_ours=times,
                    times_ours_low=low, times_ours_high=25.0)
    rows = [row("naive", 3.0), row("DI-engine naive", 1.5), row("TRL", 2.0), row("ours", 1.0),
            row("ours in place", 0.8), row("loop", 7.0, "GAE", "9x9"),
            row("ours", 1.0, "GAE", "9x9")]
    head, both, scan = speed.summary(rows)
    assert both[4:] == ("20.00", "3.0 [0.5, 25.0]", "1.5 DI-engine")
    assert scan[4:] == ("20.00", "7.0 [0.5, 25.0]", "")
    widest = [max(map(len, x)) for x in zip(head, both, scan)]
    assert sum(widest) + 2 * 6 + len("from hidden states") - len("task") <= 100


def test_each_case_says_which_it_is_and_parts_are_for_who_asks(monkeypatch):
    said, measured = [], []
    monkeypatch.setattr(speed, "copy_bandwidth", lambda device: 1.0)
    monkeypatch.setattr(speed, "measure", lambda case, *_: measured.append(case) or [])
    for every in (False, True):
        speed.bench(((2, 3, 40),), "cpu", 1, every=every, begin=said.append)
    assert [s.split(":")[0] for s in said] == [f"{i} of {n}" for n in (10, 11)
                                               for i in range(1, n + 1)]
    few, many = ({m for c in cases for m in c.methods} for cases in (measured[:10], measured[10:]))
    assert many - few >= {"ours, plain", "ours in place", "copy"} and {"naive", "ours"} <= few
