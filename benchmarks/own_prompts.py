"""Race GRPO on prompts of one's own against TRL's trainer: a tiny Qwen2 and a tiny Llama on a CPU.

    python benchmarks/own_prompts.py

Writes nbs/studies/results/own_prompts.csv: for each model, length of a response and seed, the
seconds of processor time that an iteration takes on one thread, the first one left out, ours and
TRL's by turns. "short" are responses of up to 16 tokens, "long" of up to 512. Prompts of 3 to 12
words, the reward a function of the text; batch, group, passes, KL and optimizer are the same. TRL
has to be installed.
"""
import tempfile
import time

import torch
from jobs import RESULTS, options, read, text, write

from rlhf_notes import RLHF
from rlhf_notes.studies import benchmark_rlhf as study
from rlhf_notes.training.statistics import bootstrap_interval

OUT = RESULTS / "own_prompts.csv"
COLUMNS = "model", "case", "seed", "iterations", "ours", "trl", "ratio"
SHAPE = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=1024, vocab_size=512,
             bos_token_id=None, eos_token_id=0, pad_token_id=None)
CASES = {"short": dict(max_new_tokens=16, batch=128, iterations=6),
         "long": dict(max_new_tokens=512, batch=32, iterations=2)}
RACES = [f"{model} {case}" for model in ("Qwen2", "Llama") for case in CASES]
PROMPTS = [" ".join(f"w{(7 * i + j) % 511 + 1}" for j in range(3 + i % 10)) for i in range(64)]

def make_tokenizer():
    "A token for each word; w0 ends a response."
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(512)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w0",
                                   padding_side="left", clean_up_tokenization_spaces=False)

def save_model(kind, seed, folder):
    "An untrained model."
    import transformers
    config = getattr(transformers, f"{kind}Config")(**SHAPE)
    torch.manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)

def reward(prompts, completions, **columns):
    "The share of words with an even number."
    found = [[int(w[1:]) % 2 == 0 for w in text.split()] for text in completions]
    return [sum(x) / max(1, len(x)) for x in found]

def ours(trainer):
    "When iterations ended."
    ends = []
    while trainer.left:
        trainer.iterate()
        ends.append(time.process_time())
    return ends

def trl(folder, config):
    "The same of TRL's trainer."
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    c, ends, steps = config, [], config.epochs * config.minibatches

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step % steps == 0:
                ends.append(time.process_time())
    args = GRPOConfig(**study._shared(c, folder + "/trl"), gradient_checkpointing=False,
                      per_device_train_batch_size=c.batch // c.minibatches,
                      steps_per_generation=c.minibatches, num_iterations=c.epochs,
                      max_steps=c.iterations * steps, num_generations=c.group, top_k=0, top_p=1.0,
                      max_completion_length=c.response_length, beta=c.beta, epsilon=c.clip,
                      loss_type="grpo")
    trainer = GRPOTrainer(model=AutoModelForCausalLM.from_pretrained(folder), args=args,
                          reward_funcs=reward, processing_class=make_tokenizer(),
                          train_dataset=Dataset.from_dict({"prompt": PROMPTS}))
    trainer.add_callback(Clock())
    trainer.train()
    return ends

def race(kind, case, seed):
    "The row of a race."
    from transformers import AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as folder, study._quiet():
        save_model(kind, seed, folder)
        lm = AutoModelForCausalLM.from_pretrained(folder)
        trainer = RLHF(lm, make_tokenizer(), prompts=PROMPTS, reward=reward, seed=seed,
                       device="cpu", kl_target=0.0, **CASES[case])
        turns = {"ours": lambda: ours(trainer), "trl": lambda: trl(folder, trainer.config)}
        order = sorted(turns, reverse=bool(seed % 2))
        ends = {name: turns[name]() for name in order}
    counted = trainer.config.iterations - 1
    a, b = ((ends[name][-1] - ends[name][0]) / counted for name in ("ours", "trl"))
    return [kind, case, seed, counted, a, b, b / a]

def main():
    args = options(__doc__, OUT, 5, RACES)
    torch.set_num_threads(1)
    rows = [] if args.fresh else read(args.out, COLUMNS)
    done = {tuple(row[:3]) for row in rows}
    for name in args.only:
        for seed in args.seeds:
            if (*name.split(), str(seed)) in done: continue
            rows.append([text(x) for x in race(*name.split(), seed)])
            write(args.out, COLUMNS, rows)
            print(*rows[-1], flush=True)
        ratios = [float(r[-1]) for r in rows if r[:2] == name.split()]
        low, high = bootstrap_interval(ratios, statistic="median")
        print(f"{name}: TRL takes {sorted(ratios)[len(ratios) // 2]:.2f} times as long, "
              f"{low:.2f} to {high:.2f}", flush=True)

if __name__ == "__main__":
    main()
