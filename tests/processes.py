"Programs in processes of their own, and some that are stopped while they train."
import os
import signal
import socket
import subprocess
import sys
import time
import traceback

import torch

# A fork has the imports of this process, some four seconds; a GPU's threads it could not have.
FORKS = sys.platform == "linux" and not torch.cuda.is_available()


def start(code, **kwargs):
    "As `subprocess.Popen` of a Python that runs `code`, its outputs in pipes."
    def inside():
        os.closerange(3, 4096)  # one of them tells `Popen` that all went well
        code_of_exit = 1
        try:
            streams = sys.stdin, sys.stdout, sys.stderr = [*map(open, range(3), "rww")]
            for number in (signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            exec(code, {"__name__": "__main__"})
            code_of_exit = 0
        except SystemExit as e: code_of_exit = int(e.code or 0)
        except BaseException: traceback.print_exc()
        finally:
            for stream in streams[1:]: stream.flush()
            os._exit(code_of_exit)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
                            preexec_fn=inside if FORKS else None, **kwargs)


def run(code, **kwargs):
    "As `subprocess.run` of a Python that runs `code`."
    with start(code, **kwargs) as process:
        out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


ALONE = """
from accelerate.state import AcceleratorState, GradientState
AcceleratorState._reset_state(True)  # a fork has that of the process before it
GradientState._reset_state()
"""


def together(count, code, **kwargs):
    "As torchrun: `code` in several processes on the CPU; the error of one that fails."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    place = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=count,
                 LOCAL_WORLD_SIZE=count, ACCELERATE_USE_CPU="true", OMP_NUM_THREADS=1)
    def ranked(rank):
        here = {k: str(v) for k, v in (place | dict(RANK=rank, LOCAL_RANK=rank)).items()}
        paths = f"import os, sys\nsys.path[:], more = {sys.path!r}, {here!r}\nos.environ |= more\n"
        return start(paths + ALONE + code, **kwargs)
    members = [ranked(rank) for rank in range(count)]
    try:
        said = [p.communicate(timeout=300)[1] for p in members]
    finally:
        for p in members: p.kill()
    assert not any(p.returncode for p in members), "\n".join(said)


def stopped(process, metrics, number):
    "What a process printed, out and err, that got a signal once `metrics` had three rows."
    deadline = time.time() + 120
    while process.poll() is None and time.time() < deadline and not (
        metrics.exists() and metrics.read_bytes().count(b"\n") > 3):
        time.sleep(0.005)
    process.send_signal(getattr(signal, number))
    return process.communicate(timeout=120)
