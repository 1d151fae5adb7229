"Programs in processes of their own, and some that are stopped while they train."
import os
import signal
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
            sys.stdin, sys.stdout, sys.stderr = (open(i, how) for i, how in enumerate("rww"))
            for number in (signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            exec(code, {"__name__": "__main__"})
            code_of_exit = 0
        except SystemExit as e: code_of_exit = int(e.code or 0)
        except BaseException: traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr): stream.flush()
            os._exit(code_of_exit)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
                            preexec_fn=inside if FORKS else None, **kwargs)


def run(code, **kwargs):
    "As `subprocess.run` of a Python that runs `code`."
    with start(code, **kwargs) as process:
        out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def stopped(process, metrics, number):
    "What a process printed, out and err, that got a signal once `metrics` had three rows."
    deadline = time.time() + 120
    while process.poll() is None and time.time() < deadline and not (
        metrics.exists() and metrics.read_bytes().count(b"\n") > 3):
        time.sleep(0.005)
    process.send_signal(getattr(signal, number))
    return process.communicate(timeout=120)
