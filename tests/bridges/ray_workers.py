"Two Ray workers import verl, and each computes our loss of its shard; what they add up to."
import os
import sys

import ray
import torch

def shard(rows, dp_size, seed=1):
    "Loss, gradient and the names that verl found, in whichever process this runs."
    import verl  # noqa: F401  its plugins register ours
    from bridges.agreement import batch, value_and_grad
    from bridges.verl_losses import actor, call
    logp, old, A, mask, _ = batch(seed)
    info = dict(dp_size=dp_size, batch_num_tokens=int(mask.sum()), global_batch_size=len(logp))
    loss = call("rlhf_notes_dapo", "token-mean", actor(**info), old[rows], A[rows], mask[rows])
    return value_and_grad(loss, logp[rows])


def differences():
    "Of value and gradient, between the mean of two workers and the whole batch."
    where = dict(env_vars=dict(PYTHONPATH=os.pathsep.join(sys.path)))  # of this test's modules
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", runtime_env=where)
    try:
        work = ray.remote(num_cpus=1)(shard)
        parts = ray.get([work.remote(rows, 2) for rows in (slice(0, 4), slice(4, 8))])
    finally:
        ray.shutdown()
    value, gradient = shard(slice(0, 8), 1)
    mean = sum(p[0] for p in parts) / 2
    together = torch.cat([p[1] for p in parts]) / 2
    return (mean - value).abs().item(), (together - gradient).abs().max().item()


if __name__ == "__main__":
    print(*differences())
