"Hands what settings.ini says of the package to setuptools, which reads pyproject.toml by itself."
import json
from configparser import ConfigParser
from pathlib import Path
from shutil import copy

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

here = Path(__file__).parent
parser = ConfigParser(delimiters=["="])
parser.read(here / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]
extras = {name: cfg[f"{name}_requirements"].split() for name in ("peft", "track", "data", "video", "games", "dev", "crosscheck")}
extras["all"] = [r for name in ("peft", "track", "data", "video") for r in extras[name]]


def without_outputs(notebook):
    nb = json.loads(notebook.read_text(encoding="utf-8"))
    for cell in nb["cells"]:
        if cell["cell_type"] == "code": cell["outputs"] = []
    return json.dumps(nb, ensure_ascii=False)


class WithNotebooks(build_py):
    "A wheel holds the notebooks without their outputs, and the results that they read."
    def run(self):
        super().run()
        if self.editable_mode: return
        for path in (here / "nbs").rglob("*"):
            if path.suffix not in (".ipynb", ".csv") or ".ipynb_checkpoints" in path.parts: continue
            to = Path(self.build_lib, "rlhf_notes", path.relative_to(here))
            to.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".csv": copy(path, to)
            else: to.write_text(without_outputs(path), encoding="utf-8")
        copy(here / "tests" / "crosscheck" / "peers.py", Path(self.build_lib, "rlhf_notes", "nbs", "studies"))


setup(
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=cfg["keywords"].split(),
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Education",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    cmdclass={"build_py": WithNotebooks},
    packages=find_packages(include=["rlhf_notes", "rlhf_notes.*"]),
    package_data={"rlhf_notes": ["py.typed", "*.pyi", "studies/*.csv", "viz/*.js", "viz/*.css", "viz/*.html"]},
    install_requires=cfg["requirements"].split(),
    extras_require=extras,
    entry_points={
        "console_scripts": cfg["console_scripts"].split(),
        "nbdev": ["rlhf_notes = rlhf_notes._modidx:d"],  # other projects of nbdev link to our names
        "verl.plugins": ["rlhf_notes = rlhf_notes.bridges.verl"],  # `import verl` loads it
    },
    zip_safe=False,
)
