"""Open every page of the site in Chromium, from file://, on a wide and on a narrow screen, in light and dark (`make docs`).

No console error, no request to a network, no missing picture, no TeX left as text, nothing wider than the screen; sliders follow the keyboard;
axe-core finds nothing serious; search finds what it should. The last test plants each of these faults and sees that it is found.
"""
import os
import re
from pathlib import Path
from urllib.parse import quote

import pytest

SITE = Path(os.environ["SITE"]).resolve()
ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html"))
WIDTHS = {"desktop": 1400, "phone": 390}

LOOK = """async () => {
  await window.MathJax?.startup?.promise;
  document.querySelectorAll("details").forEach((d) => { d.open = true; });
  document.querySelectorAll("img").forEach((i) => { i.loading = "eager"; });
  await Promise.all([...document.images].map((i) => i.complete ? 0 : new Promise((done) => { i.onload = i.onerror = done; })));
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const found = [];
  for (const i of document.images) if (!i.naturalWidth) found.push(`missing picture: ${i.getAttribute("src").slice(0, 100)}`);
  const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let n = words.nextNode(); n; n = words.nextNode()) {
    if (n.parentElement.closest("pre, code, script, style, mjx-container, textarea, svg title, noscript")) continue;
    if (/\\\\[a-zA-Z]{2,}|\\\\[()[\\]]|\\$\\$|\\$[^$\\s][^$]*\\$/.test(n.data)) found.push(`TeX left as text: ${n.data.trim().slice(0, 100)}`);
  }
  document.querySelectorAll("mjx-merror, [data-mjx-error]").forEach((e) => found.push(`MathJax cannot read: ${e.textContent.slice(0, 100)}`));
  const wide = document.documentElement;
  if (wide.scrollWidth > wide.clientWidth) {
    const guilty = [...document.querySelectorAll("body *")].filter((e) => e.getBoundingClientRect().right + scrollX > wide.clientWidth + 1 && getComputedStyle(e).position !== "fixed");
    found.push(`wider than the screen, ${wide.scrollWidth} > ${wide.clientWidth}: ${guilty.slice(0, 3).map((e) => e.tagName + "." + e.className).join(", ")}`);
  }
  const phone = innerWidth < 700, shown = (e) => e.checkVisibility() && e.clientWidth;
  const cut = (e) => shown(e) && e.scrollWidth > e.clientWidth + 1 && !(phone && e.closest(".scrolls"));
  for (const e of document.querySelectorAll("mjx-container[display='true'], div.math")) if (cut(e)) found.push(`a formula wider than its box, ${e.scrollWidth} > ${e.clientWidth}: ${e.textContent.slice(0, 60)} ${e.id}`);
  for (const e of document.querySelectorAll(".table-wrapper")) if (cut(e)) found.push(`the last column is cut, ${e.scrollWidth} > ${e.clientWidth}: ${e.innerText.slice(0, 60)}`);
  for (const e of document.querySelectorAll("article :is(img, svg)")) {
    const place = e.closest(".cell_output, .widget, .planted")?.getBoundingClientRect(), own = e.getBoundingClientRect();
    if (!place || !shown(e) && !own.width || !e.checkVisibility() || e.closest("mjx-container, .panels, summary, button")) continue;
    const natural = e.naturalWidth || parseFloat(e.getAttribute("viewBox")?.split(" ")[2]) * (e.closest("[data-slider]") ? 4 / 3 : 1);
    if (phone && 12 * own.width / natural < 9) found.push(`text of ${(12 * own.width / natural).toFixed(1)} px in a figure: ${(e.alt ?? e.textContent).slice(0, 60)}`);
    const [left, right] = [own.left - place.left, place.right - own.right];
    if (!e.closest(".widget") && Math.min(left, right) > -1 && Math.abs(left - right) > 12) found.push(`a figure that neither fills the column nor stands in its middle, ${left.toFixed(0)} and ${right.toFixed(0)}: ${(e.alt ?? "").slice(0, 60)}`);
  }
  for (const t of document.querySelectorAll(".widget svg text")) {
    const own = t.getBoundingClientRect(), box = t.closest("svg").getBoundingClientRect();
    if (own.right > box.right + 1 || own.left < box.left - 1) found.push(`words that run out of a drawing: ${t.textContent}`);
  }
  const small = [...document.querySelectorAll("article *")].find((e) => e.checkVisibility() && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) && !e.closest("svg, sub, sup, mjx-container, style, script") && parseFloat(getComputedStyle(e).fontSize) < 9);
  if (small) found.push(`text of ${getComputedStyle(small).fontSize}: ${small.textContent.slice(0, 60)}`);
  return found;
}"""
WHITE = """() => [...document.querySelectorAll("div.cell_output img, div[data-slider] > [role='img'] > svg, .planted img")].filter((e) => e.checkVisibility() && getComputedStyle(e).filter === "none").map((e) => `a white card in the dark: ${(e.alt ?? "").slice(0, 60)}`)"""
AXE = """async (rules) => {
  const known = new Set();              // of the words of code that look alike, and of the formulas, one of each is enough
  document.querySelectorAll("pre span:not(:has(*)), .sig span:not(:has(*)), mjx-container").forEach((e) => {
    const formula = e.tagName == "MJX-CONTAINER", kind = e.className + (formula ? e.parentElement.tagName : e.closest("pre, .sig").className + e.closest("pre, .sig").parentElement.className);
    if (!known.has(kind)) known.add(kind); else if (formula) e.remove(); else e.replaceWith(e.textContent);
  });
  const r = await axe.run(document, {resultTypes: ["violations"], preload: false, ...(rules && {runOnly: {type: "rule", values: rules}})});
  return r.violations.filter((v) => ["serious", "critical"].includes(v.impact)).map((v) => `${v.id} (${v.nodes.length}): ${v.help}; ` +
    v.nodes.slice(0, 3).map((n) => `${n.html.slice(0, 160)} | ${(n.any[0] ?? n.all[0] ?? n.none[0])?.message ?? ""}`).join("; "));
}"""
STATE = "box => [...box.querySelectorAll('*')].map(e => [e.getAttribute('style'), e.getAttribute('hidden'), e.className?.baseVal ?? e.className, e.childElementCount ? '' : e.textContent, e.getAttribute('d'), e.getAttribute('href')].join()).join(';')"


class Tab:
    "A tab that remembers what went wrong in it."
    def __init__(self, browser, width):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme="light", reduced_motion="reduce")
        self.page, self.faults = self.context.new_page(), []
        self.page.on("console", lambda m: self.faults.append(f"console: {m.text}") if m.type == "error" else None)
        self.page.on("pageerror", lambda e: self.faults.append(f"error: {e}"))
        self.page.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else self.faults.append(f"request to a network: {r.url}"))
        self.page.on("requestfailed", lambda r: self.faults.append(f"404: {r.url}") if r.failure == "net::ERR_FILE_NOT_FOUND" else None)
        self.context.route(lambda url: not url.startswith(("file:", "data:", "blob:")), lambda route: route.abort())

    def open(self, path, query=""):
        self.page.goto(Path(path).resolve().as_uri() + query)
        return self

    def look(self):
        self.faults += self.page.evaluate(LOOK)
        return self

    def sliders(self):
        "Each slider moves with the arrow keys, and something around it changes with it."
        for slider in self.page.query_selector_all("input[type=range]"):
            if not slider.is_visible() or slider.get_attribute("min") == slider.get_attribute("max"): continue
            box = slider.evaluate_handle("s => s.closest('.cell_output, .output, section, body')").as_element()
            before, value = box.evaluate(STATE), slider.input_value()
            slider.focus()
            self.page.keyboard.press("ArrowLeft" if value == slider.get_attribute("max") else "ArrowRight")
            if slider.input_value() == value: self.faults.append(f"a slider does not follow the arrow keys: {slider.evaluate('s => s.outerHTML')[:200]}")
            elif box.evaluate(STATE) == before: self.faults.append(f"a slider moves and nothing else does: {slider.evaluate('s => s.outerHTML')[:200]}")
        return self

    def axe(self):
        "Everything in light, and colours again in dark."
        self.page.evaluate((ROOT / "docs" / "axe" / "axe.min.js").read_text(encoding="utf-8") + "; 0")
        for scheme, rules in (("light", None), ("dark", ["color-contrast", "link-in-text-block"])):
            self.page.emulate_media(color_scheme=scheme)
            self.page.wait_for_timeout(250)                      # colours fade
            self.faults += [f"axe, {scheme}: {v}" for v in self.page.evaluate(AXE, rules)]
        self.faults += self.page.evaluate(WHITE)
        return self


@pytest.fixture
def tab(browser):
    tabs = []
    def make(width):
        tabs.append(Tab(browser, width))
        return tabs[-1]
    yield make
    for t in tabs: t.context.close()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", PAGES)
def test_page(tab, page, width):
    faults = tab(WIDTHS[width]).open(SITE / page).look().sliders().axe().faults
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("words, page, title", [
    ("dual clip", "formulas/surrogate.html", "clipped surrogate"),
    ("whiten", "formulas/whitening.html", "whiten"),
    ("clipped_surrogate", "formulas/surrogate.html", "clipped_surrogate"),
])
def test_search_finds(tab, words, page, title):
    found = search(tab(WIDTHS["desktop"]), words)
    assert any(href == page and title.lower() in text.lower() for href, text, _ in found[:10]), found[:10]


@pytest.mark.parametrize("term, page", [("advantage", "formulas/advantage.html"), ("gae", "formulas/advantage.html"), ("reward model", "reviews/reward_model.html"), ("own reward function", "hub/prompts.html"), ("reward function", "hub/prompts.html")])
def test_search_begins_with_the_lesson_that_defines_a_term(tab, term, page):
    (href, _, line), *rest = search(tab(WIDTHS["desktop"]), term)
    assert href == page and term in line.lower() and sum(bool(line) for *_, line in rest[:10]) >= 5


QUERIES = {
    "what to monitor": "metrics", "multi GPU": "bridges/scale#where-our-own-trainer-ends", "CNN": "control/own_environment#a-picture", "several rewards": "formulas/advantage#several-rewards", "pass@k": "studies/checkable#the-formula",
    "reward hacking": "studies/variants#goodhart-s-law-watched", "Goodhart's law": "studies/variants#goodhart-s-law-watched", "LoRA": "hub/load", "my own environment": "control/envs",
    "own prompts": "hub/prompts", "resume a run": "training/runs", "save model": "hub/save", "inside verl": "bridges/verl",
    "TRL": "bridges/trl", "entropy collapse": "why#the-entropy-collapses-or-explodes",
    "ratio is always 1": "why#the-ratio-is-always-1-and-nothing-is-clipped-is-ppo-broken", "negative KL": "why#my-kl-is-negative-how-can-that-be", "which algorithm": "rlhf",
    "human feedback": "rlhf", "cheat sheet": "sheet", "exercises": "exercises/check", "command line": "cli", "dual clip": "formulas/surrogate",
    "GAE": "formulas/advantage", "GRPO": "formulas/grpo", "DPO": "language/dpo", "KL penalty": "formulas/kl", "token mean or sequence mean": "formulas/masking#from-token-losses-to-one-number",
    "how many seeds": "studies/seeds", "dict observations": "control/spaces", "verifiable rewards": "studies/checkable",
    "multi-turn": "hub/turns", "tool calls": "hub/turns", "gradient checkpointing": "hub/load", "async reward server": "hub/rewards",
    "MDP": "start#thirty-lines-that-learn", "Markov decision process": "start#thirty-lines-that-learn", "Monte Carlo": "formulas/advantage#the-formulas", "curriculum": "studies/checkable#easy-prompts-hard-prompts",
    "how to debug PPO": "doctor", "ratio explodes NaN": "formulas/ratio#the-trap", "critic": "formulas/value", "trajectory": "start#thirty-lines-that-learn",
    "tanh squash action log prob": "control/policy#what-the-log-probability-is-then", "completions truncated max length reward zero": "why#responses-run-to-the-longest-length",
    "GRPO loss starts at 0": "why#grpo-s-loss-is-0-then-it-rises-is-it-learning",
    "rewards of several scales": "formulas/advantage#several-rewards", "PPO or GRPO": "rlhf#which-to-take",
    "out of memory": "hub/recipes#memory", "Q-learning": "index#who-this-is-for", "learning rate for GRPO": "hub/recipes#which-learning-rate",
    "two GPUs": "bridges/scale#where-our-own-trainer-ends", "DPO or PPO": "studies/preferences", "num_generations": "why#how-many-generations-do-i-need",
}


def test_the_words_of_the_field_lead_to_the_page_about_them(tab):
    page, wrong = tab(WIDTHS["desktop"]).open(SITE / "search.html").page, {}
    for words, about in QUERIES.items():
        page.goto((SITE / "search.html").as_uri() + f"?q={quote(words)}")
        found = page.get_attribute("#about a", "href", timeout=5_000) if page.locator("#about a").count() else None
        if found != re.sub("(#|$)", r".html\1", about, count=1): wrong[words] = found
    assert len(QUERIES) == 54 and not wrong, wrong


# Questions as people ask them -> the page that answers; it is the page about them, or that of one of the closest sections.
ASKED = {
    "GRPO loss 0 then increases": "why", "clip ratio always 0": "why", "how many generations per prompt": "why", "vllm logprobs differ from trainer": "bridges/scale why",
    "top p sampling with importance ratio": "formulas/logprob", "DPO chosen logprob decreases": "language/dpo", "KL negative": "why", "several rewards of different scale": "formulas/advantage",
    "truncation vs termination autoreset gymnasium": "formulas/advantage", "clip or tanh squash actions": "control/policy", "value loss is huge": "metrics",
    "completions all truncated reward zero": "why", "entropy collapse clip higher": "why", "LoRA rank and learning rate": "why", "PPO collapses after solving CartPole": "why",
    "greedy evaluation worse than sampling": "why", "multi-turn mask tool output credit": "hub/turns", "gamma lambda for language models": "settings", "share actor and critic network": "settings",
    "update reference model during training": "settings", "why k1 in the loss has zero gradient": "why formulas/kl", "when does value clipping hurt": "formulas/value",
    "normalize advantages per minibatch or batch": "formulas/whitening", "GRPO divide by std criticism difficulty bias": "formulas/advantage formulas/grpo",
    "what to monitor during PPO training": "metrics", "reward function with dataset column": "hub/prompts", "LoRA own model load in transformers": "hub/load", "choose KL coefficient beta adaptive": "formulas/kl",
    "reward hacking example": "studies/variants", "response cut off without eos": "language/rollout", "compare PPO RLOO GRPO REINFORCE++": "rlhf", "DPO gradient when does it fail": "formulas/preference",
    "pass@k unbiased estimator": "studies/checkable", "token mean vs sequence mean loss": "formulas/masking", "GAE example by hand": "formulas/advantage", "two GPUs": "bridges/scale",
    "large scale training which library": "bridges/scale", "use loss inside TRL or verl": "bridges/verl", "custom policy loss": "bridges/scale", "image observations Dict observation space": "control/spaces",
    "what is a policy gradient": "start", "why clip": "formulas/surrogate", "what is an advantage": "formulas/advantage", "PPO from scratch": "ladder", "RLHF explained": "rlhf",
    "off-policy stale samples": "studies/staleness", "reward model training": "hub/reward_trainer reviews/reward_model", "temperature": "formulas/logprob", "debug PPO": "doctor", "rate for lora": "why",
    "KL gets bigger, the same response to every prompt": "metrics why", "balance reward and KL": "studies/variants", "gradient clipping norm PPO": "metrics",
    "KL gradient when all rewards of a group are equal": "why", "old log probs when the first ratio is 1": "why formulas/ratio", "can PPO use a replay buffer": "formulas/ratio",
    "batch size and minibatch size": "language/config", "how many parallel environments": "control/config", "invalid action masking": "control/spaces",
    "value function initialised from reward model": "language/model", "process or outcome reward model": "reviews/reward_model", "normalize rewards": "formulas/reward",
}


def test_a_question_in_whole_sentences_finds_the_page_that_answers(tab):
    page, wrong = tab(WIDTHS["desktop"]).open(SITE / "search.html").page, {}
    for words, answers in ASKED.items():
        page.goto((SITE / "search.html").as_uri() + f"?q={quote(words)}")
        found = [a.split(".html")[0] for a in page.eval_on_selector_all("#about a, #closest a", "all => all.map(a => a.getAttribute('href'))")]
        if not set(found) & set(answers.split()): wrong[words] = found
    assert not wrong, wrong


def test_snippets_have_no_tags(tab):
    lines = [line for words in ("advantage", "padding", "value") for *_, line in search(tab(WIDTHS["desktop"]), words)]
    assert sum(map(bool, lines)) > 20 and not [line for line in lines if re.search("</|<(a|span|p|b|i|div)[ >]", line)]


def search(tab, words):
    "[(page, title, line)] of what the site finds."
    t = tab.open(SITE / "index.html")
    t.page.fill("input[name=q]", words)
    t.page.press("input[name=q]", "Enter")
    t.page.wait_for_selector("#search-results li a", timeout=20_000)
    t.page.wait_for_timeout(1500)
    assert not t.faults, t.faults
    return t.page.eval_on_selector_all("#search-results li", """items => items.map(i => [
        i.querySelector('a').getAttribute('href').replace(/[?#].*/, ''), i.querySelector('a').textContent,
        i.querySelector('.context')?.textContent ?? ''])""")


def test_the_picture_of_the_loop_leads_to_lessons(tab):
    t = tab(WIDTHS["desktop"]).open(SITE / "index.html")
    links = t.page.eval_on_selector_all("svg.loop a", "all => all.map(a => a.getAttribute('href'))")
    assert len(links) == 15 and all((SITE / link).exists() for link in links), links
    t.page.focus("svg.loop a")
    t.page.keyboard.press("Enter")
    t.page.wait_for_url(f"**/{links[0]}")


def folds(page): return page.eval_on_selector_all("details.fold", "all => all.map(d => d.open)")


def test_answers_are_closed_until_asked_for(tab):
    page = tab(WIDTHS["desktop"]).open(SITE / "formulas" / "surrogate.html").page
    assert len(folds(page)) >= 6 and not any(folds(page))
    assert not page.is_visible("text=All probability went to an action")
    page.focus("details.answer summary")
    page.keyboard.press("Enter")
    assert page.is_visible("text=All probability went to an action") and sum(folds(page)) == 1
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert all(folds(page))
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert sum(folds(page)) == 1


def test_a_link_opens_the_fold_that_it_leads_into(tab):
    page = tab(WIDTHS["desktop"]).open(SITE / "formulas" / "surrogate.html").page
    page.evaluate("document.querySelectorAll('details.answer p')[2].id = 'planted'; location.hash = 'planted'")
    page.wait_for_function("document.getElementById('planted').closest('details').open")
    assert sum(folds(page)) == 1


def test_next_follows_the_path_that_was_taken(tab):
    page = tab(WIDTHS["desktop"]).open(SITE / "index.html").page
    page.click("#three-paths li:nth-child(1) >> text=surrogate")
    page.wait_for_url("**/formulas/surrogate.html")
    assert page.inner_text(".prev-page .title") == "ratio" and page.inner_text(".next-page .context") == "Next on your path"
    page.click(".next-page")
    page.wait_for_url("**/formulas/advantage.html")
    page.goto((SITE / "formulas" / "value.html").as_uri())                # not on the path
    assert page.inner_text(".next-page .title") == "The KL divergence"
    said = page.eval_on_selector(".next-page .context span", "e => e.textContent + getComputedStyle(e, '::after').content")
    assert said == 'Next" in the menu"'


@pytest.mark.parametrize("width", WIDTHS)
def test_panels_stand_above_each_other_on_a_phone(tab, width):
    page = tab(WIDTHS[width]).open(SITE / "formulas" / "surrogate.html").page
    parts = page.locator(".panels").first.locator("img")
    first, second = [x.bounding_box() for x in parts.all()]
    assert not first and not second if width == "desktop" else second["y"] >= first["y"] + first["height"]
    assert page.locator("img.side-by-side").first.is_visible() == (width == "desktop")


def test_a_small_figure_is_whole_on_a_phone(tab):
    page = tab(WIDTHS["phone"]).open(SITE / "index.html").page
    assert page.locator("img.narrow:visible").first.bounding_box()["width"] < 390


@pytest.mark.parametrize("page", ["notation", "map", "words", "formulas/surrogate", "language/config"])
def test_tables_of_words_fit_a_phone(tab, page):
    page = tab(WIDTHS["phone"]).open(SITE / f"{page}.html").page
    assert page.locator("table").count() and not page.eval_on_selector_all(
        ".table-wrapper", "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText.slice(0, 80))")


def test_the_loop_stands_upright_on_a_phone(tab):
    page = tab(WIDTHS["phone"]).open(SITE / "index.html").page
    boxes = [a.bounding_box() for a in page.locator(".loop-steps a").all()]
    assert not page.is_visible("svg.loop") and len(boxes) == 15 and len({b["x"] for b in boxes}) == 1


def test_next_on_each_path_stands_at_the_foot_without_javascript(browser):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((SITE / "formulas" / "surrogate.html").as_uri())
    foot = page.locator(".next-on-path")
    assert foot.inner_text().splitlines()[0].startswith("Next on From nothing to CartPole: advantage") and foot.locator("a").count() == 2
    foot.locator("a").last.click()
    page.wait_for_url("**/formulas/advantage.html")
    context.close()


def test_the_marks_of_exercises_are_kept(tab):
    page = tab(WIDTHS["desktop"]).open(SITE / "exercises" / "check.html").page
    boxes = page.locator("[data-exercise] input")
    assert boxes.count() > 40 and not boxes.first.is_checked()
    boxes.first.check()
    page.reload()
    assert page.locator("[data-exercise] input").first.is_checked()


def test_the_sheet_is_printed_in_two_columns(tab):
    page = tab(WIDTHS["desktop"]).open(SITE / "sheet.html").page
    names = page.locator("article pre").all_inner_texts()
    assert len(names) >= 12 and any("clipped_surrogate" in text for text in names)
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.getElementById('a-sheet-of-all-formulas')).columnCount") == "2"
    assert page.pdf(prefer_css_page_size=True).count(b"/Type /Page\n") == 2  # both sides of one A4


FAULTS = {
    "console": "<script>console.error('planted')</script>",
    "error": "<script>null.planted</script>",
    "missing picture": '<img alt="planted, not there" src="planted.png">',
    "TeX left as text": r"<p>the ratio $r = \pi$</p>",
    "TeX left": r"<p>the ratio \(r\)</p>",
    "wider than the screen": '<div style="width: 3000px">planted</div>',
    "request to a network": '<img alt="planted, far away" src="https://example.org/planted.png">',
    "color-contrast": '<p style="color: #999; background: #fff">planted</p>',
    "axe, dark": '<style>@media (prefers-color-scheme: dark) { p { color: #444; background: #222 } }</style><p>planted</p>',
    "image-alt": '<img src="data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw==">',
    "nothing else does": '<label>planted <input type="range" min="0" max="3" value="1"></label>',
    "a formula wider": '<div class="math" style="width: 200px; overflow-x: auto"><div style="width: 900px">x</div></div>',
    "the last column is cut": '<div class="table-wrapper" style="width: 200px; overflow-x: auto"><div style="width: 900px">x</div></div>',
    "text of 6.0 px in a figure": '<article class="planted" style="display: block; width: 300px"><svg viewBox="0 0 600 10" width="300" role="img" aria-label="planted"></svg></article>',
    "text of 8px": '<article><p style="font-size: 8px">planted</p></article>',
    "neither fills": '<article class="planted" style="display: block; width: 300px"><svg viewBox="0 0 100 10" width="100" role="img" aria-label="planted"></svg></article>',
    "run out of a drawing": '<article class="planted widget" style="display: block"><svg viewBox="0 0 90 10" width="90" role="img" aria-label="planted"><text x="80" y="9">planted</text></svg></article>',
    "a white card": '<div class="planted"><img alt="planted, white" src="data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="></div>',
    "404": '<link rel="stylesheet" href="planted.css">',
    "does not follow": '<label>planted <input type="range" min="0" max="3" value="1" onkeydown="return false"></label>',
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(tab, tmp_path, fault):
    page = tmp_path / "planted.html"
    def faults(body):
        page.write_text(f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>planted</title></head><body><main><h1>A page</h1>{body}</main></body></html>', encoding="utf-8")
        return tab(WIDTHS["phone"]).open(page).look().sliders().axe().faults
    assert faults("") == []
    assert any(fault in f for f in faults(FAULTS[fault]))
