"""Python for a page: Pyodide's core, of which the site carries a copy, packed into one script.

`npm pack` fetches it once, and it is kept in the environment; its checksum stands here. A page that
is opened from a file can read a script, but no other file, so the parts are compressed and written
as text. Where there is no npm, the site is built without it, and its page says so.
"""
import base64
import gzip
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
from contextlib import suppress
from pathlib import Path

VERSION = "314.0.7"
SUM = "66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0"
PARTS = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "pyodide-lock.json",
         "python_stdlib.zip")
FILE = Path(sys.prefix) / "share" / f"pyodide-{VERSION}.tgz"


def fetched():
    "The package, or None with a line that says why."
    if not FILE.is_file() and shutil.which("npm"):
        FILE.parent.mkdir(parents=True, exist_ok=True)
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(["npm", "pack", "--silent", f"pyodide@{VERSION}", "--pack-destination",
                            str(FILE.parent)], capture_output=True, timeout=120)
    if FILE.is_file() and hashlib.sha256(FILE.read_bytes()).hexdigest() == SUM: return FILE
    why = "has another checksum" if FILE.is_file() else "cannot be had (`npm pack`)"
    print(f"the site is without Python in the page: pyodide {VERSION} {why}")


def script():
    "The parts as a script, name -> compressed bytes in base64; empty where there are none."
    if not (file := fetched()): return ""
    with tarfile.open(file) as package:
        parts = {name: package.extractfile(f"package/{name}").read() for name in PARTS}
    packed = {name: base64.b64encode(gzip.compress(x, 9, mtime=0)).decode()
              for name, x in parts.items()}
    return f"const PYODIDE = {json.dumps(packed)};\n"
