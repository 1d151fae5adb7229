"""As torchrun: a script in several processes, forked from one that has its imports already.

    python tests/together.py 2 SCRIPT ARGUMENTS
"""
import os
import runpy
import signal
import socket
import sys

import accelerate  # noqa: F401
import transformers.models.gpt2.modeling_gpt2
import transformers.trainer  # noqa: F401

def main():
    count, *sys.argv = int(sys.argv[1]), *sys.argv[2:]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        place = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]))
    pids = set()
    for rank in map(str, range(count)):
        if not (pid := os.fork()):
            os.environ |= place | dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(count),
                                       LOCAL_WORLD_SIZE=str(count))
            return runpy.run_path(sys.argv[0], run_name="__main__")
        pids.add(pid)
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if status:  # the others would wait for it
            for other in pids: os.kill(other, signal.SIGKILL)
            sys.exit(1)


if __name__ == "__main__": main()
