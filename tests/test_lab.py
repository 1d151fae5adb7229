"""The notebooks where people run them: JupyterLab by `make lab`, Binder and Colab."""
import ast
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import nbformat
import notebooks
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rules import broken

ROOT, BINDER = notebooks.ROOT, notebooks.ROOT / ".binder"
# Where a module comes from if not from a package of its own name.
COMES_WITH = dict(IPython="ipykernel", matplotlib_inline="ipykernel", PIL="matplotlib",
                  tokenizers="transformers", huggingface_hub="transformers",
                  pydantic_core="pydantic")


def lab_command():
    "The last command of `make lab`, as make would run it."
    told = subprocess.run(["make", "--no-print-directory", "-n", "-o", ".venv/.ready", "lab",
                           "READY="], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return shlex.split(told.strip().splitlines()[-1])


def test_make_lab_opens_the_index(tmp_path):
    program, *arguments = lab_command()
    assert Path(program).name == "jupyter"
    assert arguments[0] == "lab"
    assert (ROOT / arguments[-1]).name == "index.ipynb"
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    jupyter = Path(sys.executable).parent / "jupyter"
    options = ["--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0",
               "--IdentityProvider.token=", "--allow-root"]
    # a browser that says what it is told to open
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    os.mkfifo(opened)
    process = subprocess.Popen([jupyter, *arguments, *options], cwd=ROOT, stderr=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL, start_new_session=True,
                               env={**os.environ, "BROWSER": f"{browser} %s",
                                    "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
                                    "JUPYTER_DATA_DIR": str(tmp_path / "data"),
                                    "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime")})
    def too_long(*_): raise TimeoutError("JupyterLab has opened nothing for two minutes")
    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(120)
    try:
        told = opened.read_text().strip()
        if told.startswith("file:"):
            told = re.search(
                r'href="(http[^"]+)"', Path(told.removeprefix("file://")).read_text())[1]
        told = urlsplit(told)
        assert (
            told.port, told.path) == (port,
                                      "/lab/tree/index.ipynb"), f"JupyterLab opens {told.geturl()}"
        server = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        for wait in range(100):  # it tells the browser a moment before it listens
            try:
                server.connect()
                break
            except ConnectionRefusedError: time.sleep(0.1)
        def get(path):
            server.request("GET", path)
            answer = server.getresponse()
            return answer.status, answer.read().decode()
        status, page = get(told.path)
        assert status == 200 and "JupyterLab" in page and "jupyter-config-data" in page
        for path in notebooks.notebooks():
            status, found = get(f"/api/contents/{path.relative_to(ROOT / 'nbs')}?content=0")
            assert status == 200 and json.loads(found)["type"] == "notebook", path.name
        status, kernels = get("/api/kernelspecs")
        assert status == 200 and "python3" in json.loads(kernels)["kernelspecs"]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_every_notebook_asks_for_the_kernel_that_is_there():
    "JupyterLab opens it without asking which kernel to start."
    def other(path):
        return nbformat.read(path, as_version=4).metadata["kernelspec"]["name"] != "python3"
    assert not broken(other, notebooks.notebooks())


def pins():
    "constraints.txt: (name, marker or None) -> version."
    found = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            r = Requirement(line)
            found[r.name.lower(), r.marker] = r.specifier
    return found


def first_release(python): return {"python_version": python, "python_full_version": f"{python}.0"}


def refused(python):
    """Pins of constraints.txt that the first release of a Python would not install, as far as they
    are installed here; and how many were looked at.
    """
    found, looked_at = [], 0
    for (name, marker), spec in pins().items():
        if marker is not None and not marker.evaluate(first_release(python)): continue
        try: if_any = metadata(name)
        except PackageNotFoundError: continue
        if str(spec) != f"=={if_any['Version'].split('+')[0]}": continue
        looked_at += 1
        if not SpecifierSet(if_any["Requires-Python"] or "").contains(f"{python}.0"):
            found.append(f"{name}{spec} on Python {python}.0, wants {if_any['Requires-Python']}")
    return found, looked_at


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_what_is_pinned_installs_on_the_first_release_too(python):
    "Systems come with 3.11.2, too."
    assert f'"{python}"' in (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    found, looked_at = refused(python)
    assert not found and looked_at > 100
    assert refused("3.4")[0]


def requirements(kind):
    return {r.name.lower(): r for r in map(Requirement, notebooks.settings()[kind].split())}


def binder_requirements(text=None):
    lines = (text or (BINDER / "requirements.txt").read_text(encoding="utf-8")).splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def problems_of_binder(wanted, runtime):
    "Where the files of Binder say something else than settings.ini and constraints.txt."
    python = runtime.strip().removeprefix("python-")
    pinned = {name: str(spec) for (name, marker), spec in pins().items() if marker is None
              or marker.evaluate(first_release(python))}
    ranges, found = requirements("dev_requirements"), []
    for r in wanted:
        if pinned.get(r.name) != str(r.specifier):
            found.append(f"{r} is {r.name}{pinned.get(r.name)} in constraints.txt")
        if r.name not in ranges: found.append(f"{r.name} is no requirement of settings.ini")
        elif not ranges[r.name].specifier.contains(str(r.specifier).removeprefix("==")):
            found.append(f"{r} is outside of {ranges[r.name]}")
    if tuple(map(int, python.split("."))) < tuple(map(int, notebooks.NBDEV.min_python.split("."))):
        found.append(f"Python {python} is too old")
    if f'"{python}"' not in (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"):
        found.append(f"Python {python} is not tested")
    return found


def test_binder_says_what_settings_and_constraints_say():
    runtime = (BINDER / "runtime.txt").read_text(encoding="utf-8")
    assert not problems_of_binder(binder_requirements(), runtime)
    script = (BINDER / "postBuild").read_text(encoding="utf-8")
    assert script.startswith("#!")
    assert "--constraint constraints.txt" in script
    assert re.search(r"--editable \.$", script, re.M)
    assert os.access(BINDER / "postBuild", os.X_OK)
    for text, python, why in (("peft==0.1.0", "3.11", "in constraints"),
                              ("peft", "3.11", "in constraints"),
                              ("numpy==2.4.6", "3.11", "no requirement"),
                              ("", "3.9", "too old"),
                              ("", "3.15", "not tested")):
        assert any(
            why in p
            for p
            in problems_of_binder(binder_requirements(text or "#"), f"python-{python}\n")), why


def imported(path):
    """The modules without which a notebook does not run: what a function imports when it is called,
    or what a cell only tries to, is not among them.
    """
    found = set()
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type != "code" or notebooks.is_skipped(cell): continue
        for node in ast.parse("\n".join(line for line in cell.source.splitlines()
                                        if not line.startswith(("%", "!")))).body:
            if isinstance(node, ast.Import): found |= {a.name.split(".")[0] for a in node.names}
            if isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.split(".")[0])
    # peers.py lies in tests/crosscheck
    return found - set(sys.stdlib_module_names) - {"rlhf_notes", "peers"}


def test_binder_has_what_the_notebooks_import():
    "Else .binder/requirements.txt lacks it."
    there = set(requirements("requirements")) | {
        r.name for r in binder_requirements()} | {"ipykernel"}
    def missing(path): return {m for m in imported(path) if COMES_WITH.get(m, m) not in there}
    assert not broken(missing, notebooks.notebooks())


def links_to_run(text):
    "Where Binder and Colab are told to go: (repository, branch, file or None)."
    found = [
        (m[1], m[2], (parse_qs(urlsplit(m[0]).query).get("labpath") or [None])[0])
        for m
        in re.finditer(r"https://mybinder\.org/v2/gh/([\w-]+/[\w-]+)/([\w.-]+)[^\s\")>]*", text)]
    colab = (r"https://colab\.research\.google\.com/github/"
             r"([\w-]+/[\w-]+)/blob/([\w.-]+)/([^\s\")>]+)")
    return found + [(m[1], m[2], m[3]) for m in re.finditer(colab, text)]


def problems_of_links(text):
    repository, branch = (notebooks.NBDEV.git_url.removeprefix("https://github.com/"),
                          notebooks.NBDEV.branch)
    return [link for link in links_to_run(text) if link[:2] != (repository, branch) or link[2]
            and not (ROOT / link[2]).is_file()]


def test_links_to_binder_and_colab_lead_to_this_project():
    texts = (["".join(c["source"]) for p in notebooks.notebooks()
              for c in json.loads(p.read_text(encoding="utf-8"))["cells"]]
             + [(ROOT / "README.md").read_text(encoding="utf-8")])
    assert not [problem for text in texts for problem in problems_of_links(text)]
    at = "https://mybinder.org/v2/gh/rlhf-notes/rlhf_notes/main?labpath="
    assert links_to_run(f'<a href="{at}nbs/index.ipynb">') == [
        ("rlhf-notes/rlhf_notes", "main", "nbs/index.ipynb")]
    assert not problems_of_links(f'<a href="{at}nbs/index.ipynb">')
    colab = "https://colab.research.google.com/github/rlhf-notes/rlhf_notes"
    for wrong in (f"[x]({at}nbs/indx.ipynb)", "(https://mybinder.org/v2/gh/rlhf/rlhf_notes/main)",
                  f"({colab}/blob/dev/nbs/index.ipynb)"):
        assert problems_of_links(wrong), wrong
