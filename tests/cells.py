"Run the cells of a notebook one after another, as a kernel does, in a process of their own."
import faulthandler
import multiprocessing
import os
import resource
import sys
import sysconfig
from functools import cache

LIBRARIES = ["IPython.core.interactiveshell", "gymnasium", "matplotlib.pyplot",
             "matplotlib_inline.backend_inline", "torch",
             "transformers.models.gpt2.modeling_gpt2"]  # what most notebooks wait for


@cache
def processes(python):
    "Where processes of this interpreter come from: one that has the libraries already."
    context = multiprocessing.get_context("forkserver")
    context.set_executable(str(python))
    context.set_forkserver_preload(LIBRARIES)
    return context


def processor_seconds():
    "What this process and those that it has started have taken."
    used = [resource.getrusage(x) for x in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(x.ru_utime + x.ru_stime for x in used)


def inside(cells, folder, log, seconds):
    start = processor_seconds()
    # multiprocessing has brought the paths of the tests
    sys.path[:] = [p for p in sys.path if p.startswith(sys.base_prefix)
                   and "site-packages" not in p] + [sysconfig.get_path("purelib")]
    os.chdir(folder)
    for stream in (1, 2): os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    faulthandler.enable(open(2, "w", closefd=False))  # a crash says where
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance(colors="nocolor")
    for cell in cells:
        shell.run_cell(cell, store_history=True).raise_error()
    seconds.value = processor_seconds() - start


def run(python, cells, folder, log, timeout):
    """Run `cells` in `folder`; what they print goes to the file `log`. Return the seconds of the
    processor that they took, None if a cell failed or `timeout` seconds went by.
    """
    seconds = processes(python).Value("d", -1.0)
    process = processes(python).Process(target=inside, args=(cells, folder, log, seconds))
    process.start()
    process.join(timeout)
    process.kill()
    return seconds.value if seconds.value >= 0 else None
