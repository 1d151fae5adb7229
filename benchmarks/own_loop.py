"""The gradient of two processes against that of one which has the rows of both.

    python benchmarks/own_loop.py                         # ten seeds, half a minute

Appends to nbs/bridges/results/own_loop.csv: for each seed and number of responses to a process the
norm of the difference over that of the gradient, `shared` with the loss of the page, which divides
by the tokens of all processes, `own` where each divides by its own. Model, world and loss are those
of nbs/bridges/own_loop.ipynb, before the first step. A run that was stopped goes on with the first
seed that is missing.
"""
import copy
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from jobs import RESULTS, by_seed, names_of, options, text
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

BRIDGES = RESULTS.parents[1] / "bridges"
COLUMNS = "seed", "responses", "shared", "own"
SIZES = 4, 8, 16, 64


def gradient(space, model, batch):
    model.zero_grad()
    space["loss"](model, *batch)[0].backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def differences(space, seed, rows):
    "Of the two gradients from that of one process, on this process's share of the rows."
    torch.manual_seed(seed)
    model = space["Model"]()
    torch.manual_seed(1000 + 2 * seed + dist.get_rank())  # prompts and responses of its own
    prompts = torch.randint(10, (rows, 1))
    batch, *_ = space["collect"](model, copy.deepcopy(model), prompts, 0.2)
    whole, everyone = [space["everyone"](x) for x in batch], space["everyone"]
    space |= dict(everyone=lambda x: x, processes=lambda: 1)
    alone = gradient(space, model, whole)
    parallel = DistributedDataParallel(model)
    own = gradient(space, parallel, batch)
    space |= dict(everyone=everyone, processes=dist.get_world_size)
    shared = gradient(space, parallel, batch)
    return [((g - alone).norm() / alone.norm()).item() for g in (shared, own)]


def process(rank, address, seed, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    space = names_of(BRIDGES / "own_loop.ipynb", "imports", "world", "loop")
    found = [differences(space, seed, rows) for rows in SIZES]
    if rank == 0: torch.save(found, out)
    dist.destroy_process_group()


def study(seed):
    "The rows of a seed."
    with TemporaryDirectory() as tmp:
        spawn(process, (f"file://{tmp}/meet", seed, f"{tmp}/found"), nprocs=2)
        found = torch.load(f"{tmp}/found")
    return [[text(x) for x in (seed, rows, *row)] for rows, row in zip(SIZES, found)]


def main():
    by_seed(study, options(__doc__, BRIDGES / "results" / "own_loop.csv", 10), COLUMNS)


if __name__ == "__main__": main()
