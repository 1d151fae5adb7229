"The page on a run: its numbers are the run's, and what a response holds is text."
import json
import math
import shutil
import subprocess

import pytest
import torch
from hub.test_turns import talking
from language.test_own_task import SMALL, count, tokenizer
from language_models import make
from test_cli import TINY
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_notes import RLHF, cli
from rlhf_notes.formulas.grpo import _OURS, POLICY_VARIANTS, policy_loss
from rlhf_notes.formulas.masking import AGGREGATION_MODES
from rlhf_notes.hub import recorder
from rlhf_notes.language.model import head_log_probs, response_states
from rlhf_notes.view import LIMIT, VIZ, View, own_run, page, read_run

NASTY = ["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\u202eabc\u2066",
         "\ud800 alone", "&lt; \u2028 \x00", "$run ${title}", "<!--<script>"]


def run_of(page):
    "What the page holds."
    return json.loads(page.split('id="run">')[1].split("</script>")[0])


def learned(**options):
    torch.manual_seed(0)
    small = SMALL | dict(iterations=3, prompts=["w5 w6", "w7"], reward=count)
    return RLHF(make("GPT2"), tokenizer(), **small | options)


class Kept:
    "A hook that keeps the batches of a training, and the policy's log-probs after each update."
    def __init__(self): self.batches = []
    def __call__(self, trainer, row):
        loop = trainer.loop
        b, T = loop.batch, loop.batch.logp.shape[1]
        with torch.no_grad():
            hidden = response_states(loop.policy.lm, b.tokens, b.mask, T, b.response_mask)
            logp, _ = head_log_probs(loop.policy.lm, hidden, b.responses, loop.config.temperature)
        self.batches.append((b, logp))


@pytest.mark.parametrize("make_trainer", [
    learned, lambda: learned(algo="ppo"), lambda: learned(variant="gspo", kl_coef=0.1),
    talking, lambda: learned(overlong="filter", max_new_tokens=2)])
def test_the_numbers_are_those_of_the_run(make_trainer):
    t = make_trainer()
    t.learn(kept := Kept())
    found = run_of(t.view().html)
    assert [found["records"][i]["iteration"] for i in (0, -1)] == [1, len(t.rows)]
    for record in found["records"]:
        b, policy = kept.batches[record["iteration"] - 1]
        for i, r in enumerate(record["responses"]):
            own = torch.tensor([x == "1" for x in r["own"]])
            assert own.sum() == b.response_mask[i].sum() and r["score"] == pytest.approx(
                b.scores[i].item(), abs=1e-6)
            columns = dict(sampler=b.logp, policy=policy, reference=b.logp_ref,
                           advantage=b.advantages)
            for name, x in columns.items():
                got = r[name] if isinstance(r[name], list) else [r[name]] * len(own)
                got = torch.tensor([math.nan if v is None else v for v in got])
                torch.testing.assert_close(got[own], x[i, :len(own)][own], rtol=0, atol=1e-6)
            text = t.task.tokenizer.decode(b.responses[i, :len(own)])
            assert "".join(r["tokens"]).split() == text.split()


def test_a_dialogue_tells_the_environment_apart():
    t = talking().learn()
    r = run_of(t.view().html)["records"][0]["responses"][0]
    assert {"0", "1"} == set(r["own"])
    at = r["own"].index("0")
    assert r["sampler"][at] is None and r["sampler"][at - 1] is not None


def in_node(code):
    if not shutil.which("node"): pytest.skip("no node: docs/test_view.py asks Chromium the same")
    code = (VIZ / "tokens.js").read_text(encoding="utf-8") + code
    done = subprocess.run(["node", "-"], input=code, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def a_batch(B=6, T=7, far=0.3):
    g = torch.Generator().manual_seed(0)
    def normal(*shape): return torch.randn(*shape, generator=g, dtype=torch.float64)
    n = torch.tensor([7, 3, 0, 1, 5, 7])
    mask, logp = torch.arange(T) < n[:, None], -normal(B, T).abs() - 0.01
    return dict(logp=logp, logp_old=logp + far * normal(B, T), advantage=normal(B, T), mask=mask,
                logp_ref=logp + 0.5 * normal(B, T))


def both(batch, **options):
    "The push on each token that counts, by the page's function and by autograd."
    b, mask = batch, batch["mask"]
    rows = [dict(logp=b["logp"][i][m].tolist(), old=b["logp_old"][i][m].tolist(),
                 A=b["advantage"][i][m].tolist(), ref=b["logp_ref"][i][m].tolist())
            for i, m in enumerate(mask)]
    asked = dict(low=options.get("eps_low"), high=options.get("eps_high"), length=mask.shape[1],
                 variant=options["variant"], aggregation=options.get("aggregation"), group=2,
                 beta=options.get("beta", 0), kind=options.get("kl_kind", "k3"),
                 weighted=options.get("kl_weighted", False), dual=options.get("dual_clip"))
    given = f"({json.dumps(rows)}, {json.dumps(asked)})"
    got = in_node(f"console.log(JSON.stringify(pushes{given}.map((r) => r.push)))")
    logp = b["logp"].clone().requires_grad_(True)
    options = options if options.get("beta") else options | dict(beta=0.0)
    loss, _ = policy_loss(logp, b["logp_old"], b["advantage"], mask, logp_ref=b["logp_ref"],
                          group=2, **options)
    loss.backward()
    return torch.tensor(sum(got, []), dtype=torch.float64), -logp.grad[mask]


@pytest.mark.parametrize("variant", _OURS)
@pytest.mark.parametrize("options", [
    {}, *(dict(aggregation=m) for m in AGGREGATION_MODES), dict(beta=0.3, kl_weighted=True),
    dict(beta=0.3, kl_kind="k1", kl_weighted=True), dict(beta=0.3, kl_kind="k2"),
    dict(beta=0.3, kl_kind="k3")], ids=str)
def test_the_weights_are_the_gradient_of_the_policy_loss(variant, options):
    for far in (0.3, 1e-4):
        got, expected = both(a_batch(far=far), variant=variant, **options)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [
    dict(variant="grpo", eps_low=0.1, eps_high=0.4), dict(variant="ppo", dual_clip=1.5),
    dict(variant="gspo", eps_low=0.01, eps_high=0.02), dict(variant="dppo", eps_low=0.05)])
def test_the_weights_follow_the_range(options):
    got, expected = both(a_batch(far=0.8), **options)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def test_the_page_knows_each_variant():
    known = in_node("console.log(JSON.stringify([VARIANTS, AGGREGATIONS]))")
    assert known == [{x: [*POLICY_VARIANTS[x]] for x in _OURS}, [*AGGREGATION_MODES]]


def test_what_a_response_holds_stands_there_as_text():
    r = dict(prompt=0, score=1.0, parts={}, tokens=NASTY, own="1" * len(NASTY))
    run = dict(title="".join(NASTY), settings={}, lacks=[], rows=[],
               records=[dict(iteration=1, prompts=["".join(NASTY)], responses=[r])])
    text = page(run)
    assert run_of(text) == run and text.count("</script>") == 2
    text.encode()
    shown = in_node(f"console.log(JSON.stringify({json.dumps(NASTY)}.map(plain)))")
    assert shown[0] == NASTY[0] and shown[1] == NASTY[1]
    assert shown[2] == "⟨202E⟩abc⟨2066⟩" and shown[3] == "⟨D800⟩ alone"
    assert shown[4] == "&lt; ⟨2028⟩ ⟨0000⟩"


def test_characters_of_several_tokens_stand_with_the_last():
    class Bytes:
        def decode(self, ids, **_): return bytes(ids).decode(errors="replace")
    ids = [*"aé🙂\n".encode()]
    found = recorder.pieces(Bytes(), ids, {})
    assert found == ["a", "", "é", "", "", "", "🙂", "\n"]
    assert "".join(recorder.pieces(Bytes(), ids[:-2], {})).startswith("aé")


def test_a_long_training_is_kept_within_bounds(monkeypatch):
    monkeypatch.setattr(recorder, "TOKENS", 200)
    t = learned(iterations=12, group=4).learn()
    records = t.recorder.records
    assert records[0]["iteration"] == 1 and records[-1]["iteration"] == 12
    assert 2 < len(records) and t.recorder.used <= min(200, t.recorder.sampled / 6) + 2 * 16
    assert all(len(r["responses"]) % 4 == 0 for r in records)


def test_a_page_has_two_megabytes_at_most():
    r = dict(prompt=0, score=1.0, parts={}, tokens=["word "] * 2000, own="1" * 2000,
             sampler=[-1.2345678] * 2000)
    records = [dict(iteration=i, prompts=["p"], responses=[r] * 4) for i in range(40)]
    rows = [dict(iteration=i, score=0.1) for i in range(10_000)]
    text = page(dict(title="t", settings={}, lacks=[], rows=rows[:500], records=records))
    found = run_of(text)
    assert len(text.encode()) <= LIMIT and "missing" in found["lacks"][0]
    assert [found["records"][i]["iteration"] for i in (0, -1)] == [0, 39]
    assert len(own_run(dict(settings=dict(algo="grpo"), records=records), rows)["rows"]) == 500


def distance_from_saved(run):
    "The largest error of the last kept log-probs against transformers with the run's saved policy."
    lm = AutoModelForCausalLM.from_pretrained(run / "policy").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "policy")
    record, found = read_run(run)["records"][-1], []
    for r in record["responses"]:
        asked = tokenizer(record["prompts"][r["prompt"]])["input_ids"]
        ids = torch.tensor([asked + tokenizer("".join(r["tokens"]))["input_ids"]])
        with torch.no_grad(): logp = lm(ids).logits[:, :-1].log_softmax(-1)
        logp = logp.gather(-1, ids[:, 1:, None])[0, len(asked) - 1:, 0]
        own = torch.tensor([x == "1" for x in r["own"]])
        found.append((logp[own] - torch.tensor(r["policy"])[own]).abs().max().item())
    return max(found)


def test_a_run_of_the_reviews_keeps_what_the_page_needs(tmp_path, capsys):
    run = tmp_path / "run"
    assert cli.main(["rlhf", *TINY, "--out", str(run)]) == 0
    assert cli.main(["view", str(run)]) == 0
    assert capsys.readouterr().out.endswith(f"{run / 'view.html'}\n")
    found = read_run(run)
    assert [r["iteration"] for r in found["records"]] == [1, 2] and len(found["rows"]) == 2
    assert distance_from_saved(run) < 5e-6
    assert run_of((run / "view.html").read_text(encoding="utf-8")) == found
    (run / "responses.json").unlink()  # as earlier versions wrote it
    assert cli.main(["view", str(run), "--out", str(tmp_path / "old.html")]) == 0
    found = run_of((tmp_path / "old.html").read_text(encoding="utf-8"))
    assert "earlier version" in found["lacks"][0]
    assert found["records"][0]["responses"][0]["kl"] is not None


TRL = [dict(step=s, prompt=p, completion=c, reward_a=0.1 * s, advantage=a)
       for s in (5, 10) for p, c, a in (("q", "x", 1.0), ("q", "</script>", -1.0))]
CHAT = [dict(step=1, prompt=[dict(role="user", content="q")], reward_a=1.0, reward_b=2.0,
             advantage=0.0, completion=[
                 dict(role="assistant", content="", tool_calls=[dict(name="f")]),
                 dict(role="tool", content="7"), dict(role="assistant", content="seven")])]
VERL = [dict(input="q", output=f"a\ud800{i}", gts="7", score=float(i), step=3) for i in (0, 1)]


@pytest.mark.parametrize("rows, checks", [
    (TRL, dict(score=0.5, parts={"reward_a": 0.5}, tokens=["x"], own="1", advantage=1.0)),
    (CHAT, dict(score=3.0, own="101", roles=["assistant", "tool", "assistant"], advantage=0.0)),
    (VERL, dict(score=0.0, tokens=["a\ud8000"], own="1"))], ids=["trl", "chat", "verl"])
@pytest.mark.parametrize("kind", [".parquet", ".jsonl"])
def test_logs_of_trl_and_verl_are_read(rows, checks, kind, tmp_path):
    folder = tmp_path / "completions"
    folder.mkdir()
    for step in {row["step"] for row in rows}:
        part, file = [r for r in rows if r["step"] == step], folder / f"{step}{kind}"
        if kind == ".jsonl": file.write_text("\n".join(map(json.dumps, part)) + "\n\n")
        elif rows is VERL: pytest.skip("verl writes JSON lines")
        else:
            pa = pytest.importorskip("pyarrow")
            import pyarrow.parquet
            pa.parquet.write_table(pa.Table.from_pylist(part), file)
    for path in (tmp_path, folder, file):
        found = read_run(path)
        assert "no log-probabilities" in found["lacks"][0]
        View(found)
    first = read_run(tmp_path)["records"][0]
    assert first["iteration"] == min(row["step"] for row in rows)
    assert {k: first["responses"][0][k] for k in checks} == checks


@pytest.mark.parametrize("content, told", [
    (None, "which is not there"), ("", "column completion or output or response"),
    ("no json", "Expecting value"), ('{"a": 1}', "column completion"), ("[1]", "column completion"),
    ('{"output": "x"}\n{"a": 1}', "column completion")])
@pytest.mark.parametrize("name", ["log.jsonl", "log.txt", "log.parquet"])
def test_what_is_no_run_is_told_in_a_sentence(content, told, name, tmp_path, capsys):
    path = tmp_path / name
    if content is not None: path.write_text(content)
    assert cli.main(["view", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(path) in error
    assert told in error or name == "log.parquet" and "parquet" in error
    assert [p.name for p in tmp_path.iterdir()] == ([] if content is None else [name])


def test_a_run_without_responses_and_a_file_of_somebody_else_are_left_alone(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(dict(task="cartpole", algo="ppo")))
    assert cli.main(["view", str(tmp_path)]) == 2
    assert "cartpole has no responses" in capsys.readouterr().err
    (log := tmp_path / "log.jsonl").write_text(json.dumps(VERL[0]))
    (mine := tmp_path / "mine.html").write_text("mine")
    for out in (mine, tmp_path, tmp_path / "none" / "x.html"):
        assert cli.main(["view", str(log), "--out", str(out)]) == 2
        assert str(out) in capsys.readouterr().err
    assert mine.read_text() == "mine"
    for _ in range(2): assert cli.main(["view", str(log)]) == 0  # its own page it may replace
    with pytest.raises(ValueError, match="before its first iteration"): learned().view()


def test_a_notebook_shows_it_in_a_frame(tmp_path):
    shown = learned().learn().view(tmp_path / "run.html")
    assert shown._repr_html_().startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert (tmp_path / "run.html").read_text(encoding="utf-8") == shown.html
