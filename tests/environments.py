"An environment that has the wheel, what it requires and Jupyter, and nothing else."
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import notebooks
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# On Linux torch's wheels bring Triton, but for those without CUDA.
JUPYTER = ["ipykernel", *(["triton"] if find_spec("triton") else [])]


def required(*names):
    "All distributions that pip installs for these, without extras."
    found, todo = {}, [*map(Requirement, names)]
    while todo:
        r = todo.pop()
        name = canonicalize_name(r.name)
        if name in found or r.marker and not r.marker.evaluate({"extra": ""}): continue
        found[name] = distribution(name)
        todo += map(Requirement, found[name].requires or ())
    return found.values()


def make_environment(folder):
    "What `pip install rlhf_notes ipykernel` would make, with links to what is installed here."
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for found in required(*notebooks.settings()["requirements"].split(), *JUPYTER):
        for name in {p.parts[0] for p in found.files} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(found.locate_file(name))
    build = ["-q", "build", "--build-base", folder / "build", "--build-lib", packages]
    subprocess.run([sys.executable, "setup.py", *build, "egg_info", "--egg-base", folder],
                   cwd=notebooks.ROOT, check=True, capture_output=True)
    return folder / "bin" / "python"
