"""What can be done in the pages, in Chromium: by keyboard, on a phone, from file://, with the numbers of the library.

    SITE=_docs python -m pytest docs/widgets
"""
import json
import os
import sys
from pathlib import Path

import pytest
import torch

SITE = Path(os.environ["SITE"]).resolve()
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
PAGES = {"clip": "formulas/surrogate", "gae": "formulas/advantage", "bandit": "start", "diagnosis": "studies/failures", "policy": "rlhf"}


@pytest.fixture(scope="module")
def tabs(browser):
    "One tab for each widget, on a phone, and what went wrong in it."
    context, found = browser.new_context(viewport={"width": 390, "height": 900}, reduced_motion="reduce"), {}
    def tab(name):
        if name not in found:
            page, faults = context.new_page(), []
            page.on("console", lambda m: faults.append(m.text) if m.type == "error" else None)
            page.on("pageerror", lambda e: faults.append(str(e)))
            page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else faults.append(r.url))
            page.goto((SITE / f"{PAGES[name]}.html").as_uri())
            page.wait_for_selector(f"[data-widget={name}]:not([hidden])")
            found[name] = page, page.locator(f"[data-widget={name}]"), faults
        return found[name]
    yield tab
    context.close()


def test_scripts_are_small_and_the_helper_short():
    sizes = {p.name: p.stat().st_size for p in Path(__file__).parent.glob("*.js")}
    assert len(sizes) == 7 and sizes.pop("policy-data.js") < 1_500_000 and max(sizes.values()) < 30_000, sizes
    assert len((Path(__file__).parent / "widgets.js").read_text(encoding="utf-8").splitlines()) <= 100


@pytest.mark.parametrize("name", PAGES)
def test_a_widget_stands_in_the_place_of_a_picture(tabs, name):
    page, box, faults = tabs(name)
    picture = page.locator(".on-paper").first
    assert not faults and not picture.is_visible() and box.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert not box.evaluate("box => [...box.querySelectorAll('*')].filter((e) => e.getBoundingClientRect().right > innerWidth).length")
    small = box.evaluate("box => [...box.querySelectorAll('svg text')].filter((t) => t.getBoundingClientRect().height < 9).map((t) => t.textContent)")
    assert not small, small
    page.emulate_media(media="print")
    assert picture.evaluate("e => getComputedStyle(e).display") != "none" and not box.is_visible()
    page.emulate_media(media="screen")


@pytest.mark.parametrize("name", PAGES)
def test_without_javascript_there_is_the_picture(browser, name):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((SITE / f"{PAGES[name]}.html").as_uri())
    place = page.locator(f"[data-widget={name}]")
    assert not place.is_visible()
    before = place.locator("xpath=preceding-sibling::*[.//img or .//*[name()='svg']][1]")
    assert before.locator(".cell_output").count() and not page.locator(".on-paper").count()
    context.close()


def test_the_clip_has_the_values_and_slopes_of_the_library(tabs):
    from rlhf_notes import clipped_surrogate
    from rlhf_notes.viz import value_and_gradient
    page, *_ = tabs("clip")
    for A, eps, dual in ((1., 0.2, None), (-1., 0.2, None), (-2., 0.3, 2.), (1., 0.1, 2.)):
        r = torch.tensor([0., 0.5, 0.75, 1., 1.15, 1.5, 2.5], dtype=torch.float64)
        value, slope = value_and_gradient(lambda r: clipped_surrogate(r, torch.full_like(r, A), eps, dual_clip=dual), r)
        got = page.evaluate("([r, A, eps, dual]) => r.map((x) => [clippedSurrogate(x, A, eps, dual), clippedSlope(x, A, eps, dual)])", [r.tolist(), A, eps, dual])
        torch.testing.assert_close(torch.tensor(got, dtype=torch.float64).T, torch.stack([value, slope]))


def test_six_cases_are_named_as_the_ratio_is_dragged(tabs):
    page, box, _ = tabs("clip")
    named = set()
    slider = box.locator("input[type=range]").first
    for ratio in ("0.5", "1.1", "1.6"):
        slider.fill(ratio)
        named |= set(box.locator(".case b").all_inner_texts())
    assert len(named) == 6
    dot = box.locator("circle.dot").first
    before, place = dot.get_attribute("cx"), box.locator("svg").first.bounding_box()
    box.locator("svg").first.scroll_into_view_if_needed()
    place = box.locator("svg").first.bounding_box()
    page.mouse.move(place["x"] + place["width"] / 2, place["y"] + 50)
    page.mouse.down()
    page.mouse.move(place["x"] + place["width"] / 3, place["y"] + 50)
    page.mouse.up()
    assert dot.get_attribute("cx") != before and 0.6 < float(slider.input_value()) < 0.8
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert box.locator("circle.dot").count() == 2


@pytest.mark.parametrize("end", ["terminated", "truncated", "goes on"])
def test_the_sheet_has_the_advantages_of_the_library(tabs, end):
    from rlhf_notes import gae
    page, box, _ = tabs("gae")
    rewards, values, last = [0., 2., -1., 1.], [0.5, 0.8, 0.2, 0.9], 0.7
    got = page.evaluate("([r, v, o]) => gae(r, v, o)", [rewards, values, dict(gamma=0.9, lam=0.8, end=end, last=last)])
    done = torch.tensor([False, False, False, True])
    advantages, targets = gae(torch.tensor(rewards), torch.tensor(values), torch.tensor([*values[1:], last]),
                              done & (end == "terminated"), done & (end != "goes on"), 0.9, 0.8)
    torch.testing.assert_close(torch.tensor(got["advantages"]), advantages)
    torch.testing.assert_close(torch.tensor(got["targets"]), targets)


def test_the_sheet_follows_what_is_typed(tabs):
    _, box, _ = tabs("gae")
    last = box.locator("tbody tr").nth(4).locator("td").last
    assert last.inner_text() == "0.10"
    box.locator("[aria-label='rewards of step 3']").fill("2")
    assert last.inner_text() == "1.10"
    box.locator("select").select_option("truncated")
    assert last.inner_text() == "1.60" and box.locator("rect").count() == 8


def test_the_bandit_climbs_the_surrogate_of_the_library(tabs):
    from rlhf_notes import clipped_surrogate, importance_ratio
    page, *_ = tabs("bandit")
    actions, rewards = torch.tensor([2, 0, 1, 2]), torch.tensor([1., 2., 4.])
    for clip, baseline in ((None, 0.), (0.2, 2.3), (None, 2.3)):
        z = torch.tensor([0.1, 0., -0.2])
        old = z.log_softmax(0)[actions]
        for _ in range(5):
            z = z.detach().requires_grad_(True)
            ratio, A = importance_ratio(z.log_softmax(0)[actions], old), rewards[actions] - baseline
            objective = clipped_surrogate(ratio, A, clip) if clip else ratio * A
            z = z + 0.5 * torch.autograd.grad(objective.mean(), z)[0]
        got = page.evaluate("([z, a, o]) => improve(z, a, o)", [[0.1, 0., -0.2], actions.tolist(), dict(baseline=baseline, clip=clip, steps=5)])
        torch.testing.assert_close(torch.tensor(got), z.detach(), rtol=1e-5, atol=1e-5)


def test_with_a_baseline_the_best_action_wins(tabs):
    page, box, _ = tabs("bandit")
    box.get_by_role("button", name="A hundred", exact=True).focus()
    page.keyboard.press("Enter")
    assert "After 100 updates the expected reward is" in box.inner_text()
    assert float(box.locator(".case").inner_text().split("reward is ")[1][:4]) > 3.5


def test_one_walk_in_six_loses_the_best_action_without_a_baseline_and_none_with_it(tabs):
    page, box, _ = tabs("bandit")
    lost = page.evaluate("[false, true].map((baseline) => Array.from({length: 1000}, (_, s) => walk(s, {baseline})).filter(loses).length)")
    assert 120 < lost[0] < 200 and lost[1] == 0               # the page says 16% of 1000


def test_each_walk_is_another(tabs):
    _, box, _ = tabs("bandit")
    box.get_by_label("baseline").uncheck()
    said = []
    for _ in range(8):
        box.get_by_role("button", name="Start again").click()
        box.get_by_role("button", name="Ten").click()
        said.append(box.locator(".case").inner_text())
    assert len(set(said)) > 4, said
    box.get_by_role("button", name="A hundred walks").focus()
    box.page.keyboard.press("Enter")
    assert 3 < int(box.locator(".case").inner_text().split(" of 100 walks")[0]) < 35
    assert box.locator("polyline.thin").count() == 100
    box.get_by_label("baseline").check()


def test_the_game_has_the_cases_and_verdicts_of_the_library(tabs, capsys):
    from rlhf_notes.studies.failures import diagnose
    page, box, _ = tabs("diagnosis")
    assert page.evaluate("DIALS.cases.length") == 41
    for case in (5, 1):
        box.locator("select").select_option(str(case - 1))
        verdicts = [diagnose(case, letter) for letter in "abcd"]
        for i in sorted(range(4), key=lambda i: verdicts[i].right):
            box.locator(".answers button").nth(i).focus()
            page.keyboard.press("Enter")
            assert box.locator("[aria-live]").inner_text() == verdicts[i].text
        assert box.locator("button.right").count() == 1 and box.locator("button.wrong").count() == 3
        assert box.locator("svg[data-told]").count() == 3
    assert "Right at once: 0 of 2." in box.inner_text()


@pytest.mark.parametrize("share", [0.0, 0.35, 1.0])
def test_the_policy_has_the_log_probabilities_of_pytorch(tabs, share):
    import site_policy

    from rlhf_notes.language.model import make_gpt2
    page, *_ = tabs("policy")
    data, before, after = site_policy.read()
    lm = make_gpt2("tiny", len(data["words"]))
    state = {name: w + share * (after[name] - w) for name, w in before.items()}
    lm.load_state_dict(state | {"lm_head.weight": state["transformer.wte.weight"]})
    text = "yesterday we tried the old restaurant . the food was not very good but it seemed fine . it felt"
    tokens = [data["words"].index(word) for word in text.split()]
    with torch.no_grad(): expected = lm(torch.tensor([tokens])).logits[0].log_softmax(-1)
    got = torch.tensor(page.evaluate("([s, t]) => new GPT2(between(s)).readAll(t)", [share, tokens]))
    assert (got - expected).abs().max() < 1e-3


def test_the_policy_is_scored_as_the_human_scores_it(tabs):
    from rlhf_notes.reviews.task import true_reward
    page, *_ = tabs("policy")
    for prompt, response in (("about the old hotel .", "the pool was lovely . it was excellent ."), ("about the film .", "the room was not very bad but the room the"),
                             ("a word on the book .", "."), ("about it .", "it felt rather good . <eos> about")):
        assert page.evaluate("(x) => trueReward(...x)", [prompt, response]) == pytest.approx(true_reward(prompt, response))


def test_the_policy_responds_to_a_prompt_and_to_the_slider(tabs):
    page, box, faults = tabs("policy")
    page.wait_for_function("document.querySelector('[data-widget=policy]').innerText.includes('nats')", timeout=60_000)
    box.get_by_role("button", name="Whole response").focus()
    page.keyboard.press("Enter")
    assert "The human gives it" in box.locator(".said").inner_text()
    box.locator("input[type=text]").fill("about the unknown hotel .")
    assert "has never read: unknown" in box.locator(".said").inner_text() and box.locator(".buttons button").first.is_disabled()
    box.locator("input[type=text]").fill("about the hotel .")
    assert box.locator("tbody tr").count() == 8
    box.locator("input[type=range]").focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("document.querySelectorAll('[data-widget=policy] circle').length == 2", timeout=60_000)
    kl, score = page.evaluate("worth(0)")
    assert abs(kl) < 1e-9 and score < 0 and not faults
