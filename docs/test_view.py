"""The page that `rlhf-notes view` writes, in Chromium: the run's numbers, and text as text.
"""
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from hub.test_turns import talking
from test_view import CHAT, NASTY, VERL, Kept, learned

from rlhf_notes.formulas.grpo import policy_loss
from rlhf_notes.view import _by_step, _row, page

def varied(prompts, responses): return [float(i % 5) for i in range(len(responses))]


WIDE, NARROW = dict(width=1400, height=900), dict(width=390, height=800)


@pytest.fixture
def opened(browser, tmp_path):
    "Open a page from file://; it asks for nothing, and nothing goes wrong."
    faults, contexts = [], []

    def open_page(text, size=WIDE, **options):
        (tmp_path / "x.html").write_text(text, encoding="utf-8")
        contexts.append(context := browser.new_context(viewport=size, **options))
        tab = context.new_page()
        tab.on("console", lambda m: faults.append(m.text) if m.type == "error" else None)
        tab.on("pageerror", lambda e: faults.append(str(e)))
        tab.on("dialog", lambda d: faults.append(d.message))
        tab.on("request", lambda r: faults.append(r.url) if "x.html" not in r.url else None)
        tab.goto((tmp_path / "x.html").as_uri())
        return tab
    yield open_page
    for context in contexts: context.close()
    assert not faults


@pytest.mark.parametrize("make_trainer", [
    learned, talking, lambda: learned(variant="cispo", kl_coef=0.1, kl_in_loss=True)])
def test_a_token_shows_the_numbers_of_the_run(opened, make_trainer):
    t = make_trainer()
    t.learn(kept := Kept())
    n, c = len(t.recorder.records[-1]["responses"]), t.config
    b, policy = (x[:n] for x in kept.batches[-1])
    logp = policy.double().requires_grad_(True)
    beta = t.rows[-1]["kl_coef"] if c.loss_has_kl else 0.0
    loss, stats = policy_loss(logp, b.logp.double(), b.advantages.double(), b.response_mask,
                              c.variant, b.logp_ref.double(), beta, kl_weighted=True)
    loss.backward()
    tab = opened(t.view().html)
    assert n > 1
    rows = tab.evaluate("VIEW.responses().map((r) => ({where: r.where, numbers: r.numbers}))")
    assert len(rows) == n
    columns = dict(sampler=b.logp, policy=policy, reference=b.logp_ref, advantage=b.advantages,
                   ratio=(policy - b.logp).exp(), push=-logp.grad)
    for i, row in enumerate(rows):
        for name, x in columns.items():
            got = torch.tensor([row["numbers"][name][t] for t in row["where"]], dtype=torch.float64)
            assert (got - x[i, row["where"]]).abs().max() < 1e-6, name
    clipped = torch.tensor([row["numbers"]["clipped"][t] for row in rows for t in row["where"]])
    assert clipped.float().mean().item() == pytest.approx(stats["clip_fraction"].item(), abs=1e-6)
    tab.locator("section .token").first.click()
    said = tab.locator(".detail dd").all()
    first = rows[0]["numbers"]
    assert [float(x.get_attribute("data-value")) for x in said] == [
        first[name][0] for name in ("sampler", "policy", "reference", "ratio", "advantage", "push")]


def test_the_variant_is_chosen_in_the_page(opened):
    tab = opened(learned(reward=varied).learn().view().html)
    push = "VIEW.responses().map((r) => r.numbers.push)"
    tab.get_by_label("iteration").fill("0")
    before = tab.evaluate(push)
    assert any(x for row in before for x in row)
    tab.locator("select").filter(has_text="dr_grpo").first.select_option("sapo")
    assert tab.evaluate(push) != before and "clip of sapo stops 0" in tab.inner_text("main")
    tab.locator("select").filter(has_text="dr_grpo").first.select_option("ppo")
    assert tab.evaluate(push) == before
    tab.get_by_label("aggregation").select_option("seq-mean-token-sum")
    assert tab.evaluate(push) != before


def test_responses_are_sorted_and_iterations_opened(opened):
    t = learned(reward=varied).learn()
    tab = opened(t.view().html)
    def scores(): return [float(s.split()[1].replace("−", "-")) for s in
                          tab.locator(".facts span").all_inner_texts() if s.startswith("score")]
    tab.get_by_label("sort by").select_option("score")
    assert scores() == sorted(scores(), reverse=True) and len(set(scores())) > 1
    tab.get_by_label("lowest first").check()
    assert scores() == sorted(scores())
    tab.get_by_label("iteration").fill("0")
    assert tab.evaluate("VIEW.state.at") == 0
    tab.locator("svg").first.click(position=dict(x=150, y=60))
    assert tab.evaluate("VIEW.state.at") == len(t.recorder.records) - 1 > 0


def test_by_keyboard_on_a_phone_in_the_dark(opened):
    tab = opened(talking().learn().view().html, NARROW, color_scheme="dark")
    assert tab.evaluate("document.documentElement.scrollWidth") == NARROW["width"]
    tab.locator(".tokens").first.focus()
    tab.keyboard.press("ArrowRight")
    assert "token 1 of" in tab.inner_text(".detail")
    tab.keyboard.press("End")
    assert tab.locator(".token.chosen").count() == 1
    other = tab.locator("section .token.other").first
    other.click()
    assert "The environment wrote it" in tab.inner_text(".detail")


def test_what_a_response_holds_is_shown_as_text(opened):
    rows = [_row(dict(prompt=x, completion=x, step=1)) for x in NASTY]
    rows += [(1, "".join(NASTY), dict(rows[0][2], tokens=NASTY, own="1" * len(NASTY),
                                      roles=NASTY))]
    text = page(dict(title="".join(NASTY), settings={}, lacks=NASTY, rows=[],
                     records=_by_step(rows)))
    tab = opened(text)
    said = tab.inner_text("main")
    for x in ("</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "$run ${title}",
              "⟨202E⟩abc⟨2066⟩", "⟨D800⟩ alone", "&lt; ⟨2028⟩ ⟨0000⟩", "<!--<script>"):
        assert said.count(x) >= 4, x
    assert tab.locator("img").count() == 0


def test_a_notebook_shows_it_in_a_frame(opened):
    t = learned().learn()
    tab = opened(f"<!doctype html><meta charset=utf-8>{t.view()._repr_html_()}")
    frame = tab.frame_locator("iframe")
    assert frame.locator("section.response").count() == len(t.recorder.records[-1]["responses"])


def test_a_log_of_others_shows_what_it_has(opened):
    records = _by_step([_row(x) for x in [*CHAT, *VERL]])
    run = dict(title="log", settings={}, lacks=["no log-probabilities"], records=records,
               rows=[dict(iteration=r["iteration"], score=1.0 * i) for i, r in enumerate(records)])
    tab = opened(page(run), NARROW)
    assert "no log-probabilities" in tab.inner_text("main")
    assert tab.get_by_label("variant").count() == 0
    tab.get_by_label("iteration").fill("0")
    assert tab.locator("section .tokens.other").count() == 1  # what the tool said
    assert "tool 7" in tab.inner_text("main")
