"Hands what settings.ini says of the package to setuptools, which reads pyproject.toml by itself."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
parser = ConfigParser(delimiters=["="])
parser.read(here / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]
extras = {name: cfg[f"{name}_requirements"].split() for name in ("peft", "track", "data", "video", "dev", "crosscheck")}
extras["all"] = [r for name in ("peft", "track", "data", "video") for r in extras[name]]

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
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
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
