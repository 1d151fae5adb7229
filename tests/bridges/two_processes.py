"""Train TRL with our loss and save the weights; run by itself or by `torchrun`.

    torchrun --nproc_per_node 2 tests/bridges/two_processes.py MODEL BATCH OUT
"""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from bridges.trl_parts import grpo, train  # noqa: E402

from rlhf_notes.bridges.trl import grpo_trainer  # noqa: E402

class Fixed(grpo_trainer("dapo")):
    "Completions that follow from their prompts: the same ones, however they are shared out."

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        first = {}
        out = []
        for ids in prompt_ids:
            k = first[tuple(ids)] = first.get(tuple(ids), -1) + 1
            n = 3 + (sum(ids) + k) % 5
            out.append([2 + (7 * ids[0] + 3 * t * (k + 1)) % 40 for t in range(n)] + [1])
        return out, None


if __name__ == "__main__":
    model, batch, out = sys.argv[1:]
    trainer = grpo(Fixed, model, Path(out).parent, per_device_train_batch_size=int(batch),
                   max_steps=3, num_iterations=1, seed=3,
                   bf16=False, optim="sgd", learning_rate=1.0)  # Adam would magnify rounding
    end = train(trainer)
    if trainer.accelerator.is_main_process:
        torch.save(end, out)
