"Run the cells of a notebook one after another, as a kernel does, in a process of their own."
import faulthandler
import multiprocessing
import os
import resource
from functools import cache

LIBRARIES = ["IPython.core.interactiveshell", "fastcore.test", "gymnasium", "matplotlib.pyplot",
             "matplotlib_inline.backend_inline", "torch",
             "transformers.models.gpt2.modeling_gpt2"]  # what most notebooks wait for


@cache
def processes():
    "Where processes come from: on POSIX, one that has the libraries already."
    on_posix = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if on_posix else "spawn")
    if on_posix: context.set_forkserver_preload(LIBRARIES)
    return context


def processor_seconds():
    "What this process and those that it has started have taken."
    used = [resource.getrusage(x) for x in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(x.ru_utime + x.ru_stime for x in used)


def inside(cells, folder, log, seconds):
    start = processor_seconds()
    os.chdir(folder)
    for stream in (1, 2): os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    faulthandler.enable(open(2, "w", closefd=False))  # a crash says where
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance(colors="nocolor")
    for cell in cells:
        shell.run_cell(cell, store_history=True).raise_error()
    seconds.value = processor_seconds() - start


def run(cells, folder, log, timeout):
    """Run `cells` in `folder`; what they print goes to the file `log`. Return the seconds of the
    processor that they took, None if a cell failed or `timeout` seconds went by.
    """
    seconds = processes().Value("d", -1.0)
    process = processes().Process(target=inside, args=(cells, folder, log, seconds))
    process.start()
    process.join(timeout)
    process.kill()
    return seconds.value if seconds.value >= 0 else None
