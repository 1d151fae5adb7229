"""The pictures of what can be done in the page, for the README and the front page, into nbs/images.

    python docs/films.py [SITE] [NAME ...]

Each is taken in Chromium from the built site (`make site`), by mouse as a reader would; `view` is that of
a run that is trained first.
"""
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path

from conftest import CHROMIUM
from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "nbs" / "images"
TILE, GROUND = (420, 280), "#f8f9fb"                         # pixels; what is behind a widget
BARE = ".mobile-header, .back-to-top, .skip-to-content { display: none !important; } .widget { border: none !important; padding: 0 !important; }"


def picture(png): return Image.open(BytesIO(png)).convert("RGB")


def tile(image, edge=24):
    "The upper part of a picture within an edge, as wide as a tile."
    wide, high = image.width + 2 * edge, (image.width + 2 * edge) * TILE[1] // TILE[0]
    image = image.crop((0, 0, image.width, min(image.height, high - 2 * edge)))
    whole = Image.new("RGB", (wide, high), GROUND)
    whole.paste(image, (edge, (high - image.height) // 2))
    return whole.resize(TILE, Image.LANCZOS)


def save(image, name):
    image.quantize(96, dither=Image.Dither.NONE).save(IMAGES / f"{name}.png", optimize=True)


def press(box, name): box.get_by_role("button", name=name).first.click()


def trained(page, update=None):
    "Wait for an update of the training, or for its end."
    done = f"+(/^Update (\\d+)/.exec(text)?.[1] ?? 99) >= {update}" if update else "text.startsWith('The last 50')"
    page.wait_for_function(f"(() => {{ const text = document.querySelector('.told').innerText; return {done}; }})()", timeout=600_000)


def film(page, lab):
    "CartPole: nothing is known, it is learned, a push, a planted fault, and what comes of it."
    panes, frames, times = lab.locator(".panes").first, [], []
    def shoot(many, every, shown):
        for _ in range(many):
            page.wait_for_timeout(every)
            frames.append(picture(panes.screenshot()))
            times.append(shown)
    shoot(6, 130, 130)
    press(lab, "Train")
    for update in range(1, 28, 2):
        trained(page, update)
        shoot(1, 20, 200)
    trained(page)
    shoot(5, 130, 130)
    save(tile(picture(lab.locator("svg.track").screenshot())), "page-cartpole")
    press(lab, "Push")
    shoot(8, 60, 130)
    lab.locator("input[value=again]").check(force=True)
    page.wait_for_timeout(700)
    for update in range(2, 28, 3):
        trained(page, update)
        shoot(1, 20, 250)
    trained(page)
    shoot(6, 130, 160)
    times[-1] = 2500
    wide = 800
    frames = [f.resize((wide, f.height * wide // f.width), Image.LANCZOS) for f in frames]
    palette = frames[15].quantize(24, dither=Image.Dither.NONE)
    first, *rest = (f.quantize(palette=palette, dither=Image.Dither.NONE) for f in frames)
    first.save(IMAGES / "cartpole-page.gif", save_all=True, append_images=rest, duration=times, loop=0, optimize=True)


def clip(page, box):
    box.locator("input[type=range]").first.fill("1.35")
    return box.locator("svg").first


def gae(page, box): return box.locator("table").first


def bandit(page, box):
    for _ in range(4): press(box, "Ten")
    return box.locator("svg").first


def policy(page, box):
    press(box, "Next word")
    page.wait_for_timeout(500)
    return box.locator("table").first


def diagnosis(page, box): return box.locator(".panes").first


def update(page, box):
    for _ in range(3): press(box, "Take the step")
    page.wait_for_timeout(500)
    return box.locator(".answer").first.locator("xpath=..")


def doctor(page, box):
    box.locator("input[type=file]").set_input_files(ROOT / "tests" / "logs" / "trl_grpo_rate_0.2.json")
    box.locator("section").first.wait_for(timeout=300_000)
    return box.locator("section").first


TILES = {bandit: "start", clip: "formulas/surrogate", gae: "formulas/advantage", policy: "rlhf", update: "formulas/grpo",
         diagnosis: "studies/failures", doctor: "doctor"}


def view(browser):
    "The first screen of `rlhf-notes view RUN`."
    with tempfile.TemporaryDirectory() as run:
        for line in (["rlhf", "--seed", "0", "--iterations", "12", "--out", f"{run}/run"], ["view", f"{run}/run", "--out", f"{run}/view.html"]):
            subprocess.run([sys.executable, "-m", "rlhf_notes.cli", *line], check=True, stdout=subprocess.DEVNULL)
        page = browser.new_page(viewport=dict(width=1180, height=800))
        page.goto((Path(run) / "view.html").as_uri())
        page.locator("input[type=range]").first.fill("4")
        page.wait_for_timeout(500)
        page.locator("section .token").nth(3).click()
        image = picture(page.screenshot())
        page.close()
    return image


def main(site, names):
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for act, where in TILES.items():
            if names and act.__name__ not in names: continue
            page = browser.new_page(viewport=dict(width=480, height=900), device_scale_factor=2)
            page.goto((site / f"{where}.html").as_uri())
            box = page.locator(f"[data-widget={act.__name__}]")
            page.add_style_tag(content=BARE)
            box.scroll_into_view_if_needed()
            save(tile(picture(act(page, box).screenshot())), f"page-{act.__name__}")
            page.close()
        if not names or "film" in names:
            page = browser.new_page(viewport=dict(width=1280, height=900))
            page.goto((site / "ladder.html").as_uri())
            page.add_style_tag(content=".lab .told { min-height: 6.5em !important; }")
            lab = page.locator("[data-widget=cartpole]")
            lab.scroll_into_view_if_needed()
            film(page, lab)
            page.close()
        if not names or "view" in names: save(view(browser), "page-view")
        browser.close()


if __name__ == "__main__": main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "_docs").resolve(), sys.argv[2:])
