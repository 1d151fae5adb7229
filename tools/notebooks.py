"""Keep notebooks, modules and README in step.

    python tools/notebooks.py export               notebooks -> modules and README
    python tools/notebooks.py outputs [NB ...]     execute notebooks and store their outputs (all by
    default)
    python tools/notebooks.py run NB               execute one notebook and store nothing: this is
    how it is tested

A cell with `#| eval: false`, `#| slow` or `#| gpu` is skipped and keeps the outputs it has; `--also
slow gpu` runs those too.
"""
import argparse
import copy
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from configparser import ConfigParser
from functools import cache
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONHASHSEED", "0")
os.environ.setdefault("TQDM_DISABLE", "1")  # on a busy machine a training would say how far it is

import nbformat
from fastcore.nbio import nb2str
from nbclient import NotebookClient
from nbconvert import MarkdownExporter
from nbdev.clean import clean_nb
from nbdev.config import get_config

ROOT = Path(__file__).resolve().parent.parent
NBDEV = get_config(ROOT)  # what pyproject.toml says
BIN = Path(sys.executable).parent
WIDTH = 124  # characters that a page of the site shows of a line of code on a usual screen


@cache
def settings(root=ROOT):
    parser = ConfigParser(delimiters=["="])
    parser.read(root / "settings.ini", encoding="utf-8")
    return parser["DEFAULT"]


def notebooks(root=ROOT):
    "All the notebooks, in the order in which they are read."
    found = [p for p in (root / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts]
    return sorted(found, key=lambda p: (p.name, p))


def directives(source):
    "The `#| ...` lines that open a cell: `#| eval: false` -> {'eval': 'false'}."
    found = {}
    for line in source.splitlines():
        if not (m := re.match(r"\s*#\s*\|\s*([\w-]+):?\s*(.*)", line)):
            break
        found[m[1]] = m[2].strip()
    return found


def is_skipped(cell, also=()):
    d = directives(cell["source"])
    return d.get("eval") == "false" or any(f in d and f not in also for f in NBDEV.tst_flags)


class _Client(NotebookClient):
    "Executes a notebook, leaving alone the cells that are skipped and what they have stored."
    also = ()

    async def async_execute_cell(self, cell, cell_index, **kwargs):
        if cell["cell_type"] == "code" and is_skipped(cell, self.also):
            return cell
        return await super().async_execute_cell(cell, cell_index, **kwargs)


def execute(path, also=(), timeout=None):
    """Run the notebook at `path` in a kernel of its own and return it with its new outputs; no cell
    takes longer than `timeout` seconds.
    """
    nb = nbformat.read(path, as_version=4)
    client = _Client(
        nb, timeout=timeout, kernel_name="python3", coalesce_streams=True, store_widget_state=False,
        resources={"metadata": {"path": str(path.parent)}})
    client.also = also
    with tempfile.TemporaryDirectory() as sockets:
        if os.name == "posix":
            kernel = client.create_kernel_manager()
            kernel.transport, kernel.ip = "ipc", f"{sockets}/kernel"
        client.execute()
    return nb


def cleaned(nb):
    """The text of `nb` without execution counts, widget views, functions that a call hands back,
    and metadata that change from run to run.
    """
    nb = copy.deepcopy(nb)
    for cell in nb["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = [
                o for o in cell["outputs"]
                if not "".join(o.get("data", {}).get("text/plain", "")).startswith("<function ")]
        for out in cell.get("outputs", []):
            out.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
    clean_nb(
        nb, allowed_cell_metadata_keys=NBDEV.allowed_cell_metadata_keys, clean_ids=NBDEV.clean_ids)
    return nb2str(nb)


def _absolute(link, picture):
    """The address of a file that the index refers to: the README is read where there is no
    repository, too.
    """
    path = os.path.normpath(f"nbs/{link}")
    url, branch = NBDEV.git_url, NBDEV.branch
    if picture: return f"{url.replace('github.com', 'raw.githubusercontent.com')}/{branch}/{path}"
    return f"{url}/blob/{branch}/{path}"


def readme(root=ROOT):
    """The README, which is nbs/index.ipynb as Markdown with absolute links, and the figures it
    shows: (text, {file name: svg}).
    """
    nb = nbformat.read(root / "nbs" / "index.ipynb", as_version=4)
    figures, cells = {}, []
    for cell in nb.cells:
        d = directives(cell.source)
        if "hide" in d or cell.metadata.get("nbdev", {}).get("only") == "site": continue
        if "fig-alt" in d:
            figures[f"{cell.id}.svg"] = next(o.data["image/svg+xml"] for o in cell.outputs
                                             if "image/svg+xml" in o.get("data", {}))
            cell = nbformat.v4.new_markdown_cell(
                f"![{d['fig-alt']}](images/{cell.id}.svg)", id=cell.id)
        elif d.get("echo") == "false":
            cell = nbformat.v4.new_markdown_cell(
                "\n\n".join(o.data["text/markdown"] for o in cell.outputs), id=cell.id)
        cells.append(cell)
    nb.cells = cells
    nb.metadata["language_info"] = {"name": "python"}
    body, _ = MarkdownExporter().from_notebook_node(nb)
    body = re.sub(r"(!?)(\[[^\]]*\]\()(?![a-z]+:|#)([^)#]+)",
                  lambda m: m[1] + m[2] + _absolute(m[3], bool(m[1])), body)
    body = re.sub(r"\n{3,}", "\n\n", body)
    return ("<!-- Made from nbs/index.ipynb by `make export`; edit that. -->\n\n" + body.strip()
            + "\n", figures)


def export(root=ROOT):
    "Make the modules and the README anew: `nbdev-export`, and the index as Markdown."
    subprocess.run([BIN / "nbdev-export"], cwd=root, check=True)
    text, figures = readme(root)
    (root / "README.md").write_text(text, encoding="utf-8")
    (root / "nbs" / "images").mkdir(exist_ok=True)
    for name, svg in figures.items():
        (root / "nbs" / "images" / name).write_text(svg, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["export", "outputs", "run"])
    parser.add_argument("notebook", nargs="*", type=Path)
    parser.add_argument("--also", nargs="*", default=[], help="flags of cells to run all the same")
    args = parser.parse_args()
    if args.what == "export":
        return export()
    for path in args.notebook or notebooks():
        start = time.time()
        nb = execute(path.resolve(), args.also)
        if args.what == "outputs":
            path.write_text(cleaned(json.loads(nbformat.writes(nb))), encoding="utf-8")
        print(f"{path}: {time.time() - start:.1f} s")


if __name__ == "__main__":
    main()
