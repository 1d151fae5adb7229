"""Lessons in JupyterLab, in a browser (`make docs`): "Run All" ends without an error and changes the notebook alone, a slider moves, an exercise is told.

JupyterLab works on a copy of the repository, without the package's modules: those are the installed ones, as with a reader.
"""
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
LESSONS = {"a formula": "formulas/04_surrogate.ipynb", "a training": "start.ipynb"}
ANSWER = """def my_clipped_surrogate(ratio, advantage, eps):
    return torch.minimum(ratio * advantage, ratio.clamp(1 - eps, 1 + eps) * advantage)

check.clipped_surrogate(my_clipped_surrogate)"""
TRACKER = "@jupyterlab/notebook-extension/tracker.jupyterlab-settings"


def files(folder):
    "Each file below a folder with what it holds, JupyterLab's own copies left out."
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in folder.rglob("*") if p.is_file() and ".ipynb_checkpoints" not in p.parts}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    "(address, folder) of a JupyterLab that draws all cells of a notebook, those out of sight too."
    home = tmp_path_factory.mktemp("lab")
    nbs = shutil.copytree(ROOT / "nbs", home / "nbs", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    settings = home / "settings" / TRACKER
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps({"windowingMode": "none"}))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [Path(sys.executable).parent / "jupyter", "lab", nbs, f"--port={port}", "--ip=127.0.0.1", "--no-browser",
               "--IdentityProvider.token=", "--allow-root"]
    env = dict(os.environ, JUPYTERLAB_SETTINGS_DIR=str(home / "settings"), OMP_NUM_THREADS="1",
               JUPYTERLAB_WORKSPACES_DIR=str(home / "workspaces"), JUPYTER_RUNTIME_DIR=str(home / "runtime"))
    server = subprocess.Popen(command, cwd=home, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              start_new_session=True)
    try:
        for _ in range(300):
            try: urllib.request.urlopen(f"{address}/api/status").close()
            except OSError: time.sleep(0.2)
            else: break
        yield address, nbs
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


PROMPTS = "[...document.querySelectorAll('.jp-InputPrompt')].map((e) => e.textContent).join('')"


def menu(page, name, command):
    page.click(f"li.lm-MenuBar-item:has-text('{name}')")
    page.click(f"li.lm-Menu-item[data-command='{command}']")


def run_all(page, address, path):
    "Opens a notebook, runs it whole and saves it."
    page.goto(f"{address}/lab/tree/{path}?reset")
    page.wait_for_selector("text=| Idle", timeout=60_000)
    menu(page, "Run", "runmenu:run-all")
    page.wait_for_function(f"() => {PROMPTS}.length", timeout=60_000)
    page.wait_for_function(f"() => !{PROMPTS}.includes('*')", timeout=240_000)
    page.wait_for_selector("text=| Idle", timeout=60_000)   # a cell whose code is folded shows no prompt
    menu(page, "File", "docmanager:save")
    page.wait_for_selector(".jp-mod-dirty", state="detached")


@pytest.mark.parametrize("lesson", LESSONS)
def test_run_all_ends_well_and_leaves_no_trace(lab, browser, lesson):
    address, nbs = lab
    path, before = LESSONS[lesson], files(nbs)
    stored = nbformat.read(nbs / path, as_version=4)
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    run_all(page, address, path)
    after = files(nbs)
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} == {path}
    ran = nbformat.read(nbs / path, as_version=4)
    code = [c for c in ran.cells if c.cell_type == "code" and c.source.strip()]
    assert [c.source for c in ran.cells] == [c.source for c in stored.cells]
    assert all(c.execution_count for c in code), "a cell was not run"
    assert not [o for c in code for o in c.outputs if o.output_type == "error"]
    page.close()


def test_a_slider_moves_and_an_exercise_is_told(lab, browser):
    address, _ = lab
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    run_all(page, address, LESSONS["a formula"])
    slider = page.locator(".jp-OutputArea input[type=range]").first
    box = slider.locator("xpath=ancestor::div[contains(@class, 'jp-OutputArea-output')][1]")
    before = box.evaluate("e => e.innerHTML + e.innerText"), slider.input_value()
    slider.focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_timeout(500)
    assert slider.input_value() != before[1] and box.evaluate("e => e.innerHTML + e.innerText") != before[0]

    cell = page.locator(".jp-CodeCell", has_text="def my_clipped_surrogate")
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(ANSWER)
    page.keyboard.press("Shift+Enter")
    cell.locator(".jp-OutputArea-output").first.wait_for(timeout=60_000)
    page.wait_for_function("() => !document.querySelector('.jp-InputPrompt')?.textContent.includes('*')")
    told = cell.locator(".jp-OutputArea").last.inner_text().lower()
    assert "right" in told or "correct" in told, told
    page.close()
