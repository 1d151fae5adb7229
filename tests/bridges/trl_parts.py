"A tiny model and task for TRL's trainers, on a CPU."

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, GRPOConfig

from rlhf_notes.bridges.trl import grpo_trainer

WORDS = ["<pad>", "<eos>"] + [f"w{i}" for i in range(40)]
QUIET = dict(
    report_to="none",
    use_cpu=True,
    save_strategy="no",
    disable_tqdm=True,
    logging_steps=100,
    learning_rate=1e-2,
    gradient_checkpointing=False,
)


def save_tiny(path, seed=0):
    "A new GPT-2 and its tokenizer, in a directory."
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(seed)
    GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(WORDS),
            n_embd=32,
            n_layer=2,
            n_head=2,
            n_positions=64,
            bos_token_id=1,
            eos_token_id=1,
            pad_token_id=0,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        )
    ).save_pretrained(path)
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    ).save_pretrained(path)
    return str(path)


def different(prompts, completions, **columns):
    return [float(len(set(x.split()))) for x in completions]


PROMPTS = Dataset.from_dict({"prompt": [f"w{i % 40} w{i * 7 % 40}" for i in range(64)]})
PAIRS = Dataset.from_dict(
    {
        "prompt": ["w1 w2", "w3"] * 8,
        "chosen": [" w4 w5", " w6"] * 8,
        "rejected": [" w7", " w8 w9 w9"] * 8,
    }
)


def grpo(Trainer, path, out, **options):
    "A GRPO trainer of 16 responses, 4 to a prompt."
    usual = dict(
        per_device_train_batch_size=16,
        num_generations=4,
        num_iterations=2,
        max_completion_length=8,
        max_steps=4,
    )
    return Trainer(
        path,
        reward_funcs=different,
        args=GRPOConfig(str(out), **QUIET | usual | options),
        train_dataset=PROMPTS,
    )


def dpo(Trainer, path, out, **options):
    args = DPOConfig(str(out), **QUIET | dict(per_device_train_batch_size=4, max_steps=2) | options)
    return Trainer(path, args=args, train_dataset=PAIRS)


def weights(trainer):
    "All of them, as one vector."
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def train(trainer):
    "Its weights after training."
    torch.manual_seed(1)
    trainer.train()
    return weights(trainer)


def fixed(path, batch, out):
    "The weights after three steps on completions that follow from their prompts."
    class Fixed(grpo_trainer("dapo")):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            "The same ones, however they are shared out among processes."
            first, found = {}, []
            for ids in prompt_ids:
                k = first[tuple(ids)] = first.get(tuple(ids), -1) + 1
                n = 3 + (sum(ids) + k) % 5
                found.append([2 + (7 * ids[0] + 3 * t * (k + 1)) % 40 for t in range(n)] + [1])
            return found, None
    # Adam would magnify rounding
    return train(grpo(Fixed, path, out, per_device_train_batch_size=batch, max_steps=3,
                      num_iterations=1, seed=3, bf16=False, optim="sgd", learning_rate=1.0))
