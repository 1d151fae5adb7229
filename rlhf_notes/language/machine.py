"""Where a loop runs: one device in float32, or several processes, bfloat16, microbatches.

[The loop](../../nbs/language/27_loop.ipynb) says what is computed and asks a machine where.

- *Several processes.* [Accelerate](https://huggingface.co/docs/accelerate) talks to the others.
  All have the same options, and the weights of the first; prompts may be a share of each. Each
  samples its share of the batch, and the results are gathered, so that every statistic is one of
  the whole batch; each computes the gradient of its share of a minibatch. DDP takes the mean over
  the processes: a loss is multiplied by their number, and the sum remains.
- *Microbatches.* A minibatch that does not fit into memory is cut into parts, whose gradients add
  up, since each part divides by the count of the whole minibatch (P7).
- *bfloat16* by autocast: matrix products in half precision, the weights and all reductions in
  float32.
- *Recorded steps.* On a GPU the passes of a plain GPT-2 are recorded and replayed.
"""

__all__ = ['Machine', 'Scaled', 'make_machine']

from contextlib import nullcontext
from zlib import crc32

import torch

from ..fast import gpt2
from ..training.devices import make_accelerator, to_device
from .model import autocast


class Machine:
    "One device, float32, a minibatch in one piece."
    rank, processes, pieces = 0, 1, 1

    def prepare(self, policy):
        "Return the policy in the form that computes a training step."
        return policy

    def send(self, x):
        "A tensor of the CPU, where this machine computes."
        return x

    def precision(self):
        "A context in which matrix products have the precision of this machine."
        return autocast("cpu", "float32")

    def share(self, last):
        "A context for both passes of a part; gradients are exchanged after the last."
        return nullcontext()

    def parts(self, batch):
        "This process's parts of a minibatch, in order (P7)."
        size = len(batch) // (self.processes * self.pieces)
        first = self.rank * self.pieces
        return [batch[i * size:(i + 1) * size] for i in range(first, first + self.pieces)]

    def gather(self, x):
        "The rows of all processes, (b, ...) -> (B, ...), in the order of the processes."
        return x

    def total(self, log):
        "Add up the shares of all processes, name -> 0-dim."
        return log

    def largest(self, number):
        "The largest that a process has."
        return number

    def agree(self, lm):
        "Give each process the weights of the first."

    def check_same(self, **options):
        "ValueError names an option that is another in another process."


class Scaled(Machine):
    "Several processes by Accelerate, microbatches, bfloat16, steps recorded on a GPU."

    def __init__(self, config, device):
        self.accelerator, self.device = make_accelerator(), device
        self.pieces, self.dtype = config.microbatches, config.precision
        self.rank = self.accelerator.process_index
        self.processes = self.accelerator.num_processes
        config.check_processes(self.processes)

    def prepare(self, policy):
        self.policy = self.accelerator.prepare_model(policy)
        return gpt2.Recorded(self.policy)

    def send(self, x): return to_device(x, self.device)

    def precision(self): return autocast(self.device, self.dtype)

    def share(self, last):
        return nullcontext() if last else self.accelerator.no_sync(self.policy)

    def gather(self, x): return self.accelerator.gather(x.contiguous())

    def total(self, log):
        numbers = torch.stack([x.float() for x in log.values()])
        return dict(zip(log, self.accelerator.reduce(numbers, "sum")))

    def largest(self, number):
        return int(self.gather(torch.tensor([number], device=self.device)).max())

    def agree(self, lm):
        if self.processes == 1: return
        for x in (*lm.parameters(), *lm.buffers()):
            torch.distributed.broadcast(x.data, 0)

    def check_same(self, **options):
        sums = [crc32(repr(x).encode()) for x in options.values()]
        found = self.gather(torch.tensor([sums], device=self.device))
        for (name, x), same in zip(options.items(), (found == found[0]).all(0)):
            if not same:
                raise ValueError(f"{name} must be the same in each process, got {x!r} in process "
                                 f"{self.rank}")


def make_machine(config, device):
    "The plain machine wherever it will do: on one CPU, for whole minibatches in float32."
    special = config.microbatches > 1 or config.precision != "float32" or device.type != "cpu"
    alone = make_accelerator().num_processes == 1
    return Machine() if alone and not special else Scaled(config, device)
