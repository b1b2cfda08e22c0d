"""How much of the drift is left when score centering knows only the k most probable ids of a real model.

    python benchmarks/real/top_ids.py runs/real/smollm2       # 3 minutes; docs/real.md has the table

Tokens are drawn by the model with rounded weights, q, and scored by the model in fp32, p. Without centering the mean
score over q is q - p by the logits. With k ids and a tail alpha p it is d, 0 at these ids and q - alpha p elsewhere:
d is what is left. Shares are sqrt(sum ||d||^2 / sum ||q - p||^2) over all tokens.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).parents[1]))
from megatron_rc.rollout.quantize import is_quantizable, quantized
from megatron_rc.settings.quantization import QUANTIZATIONS
from real.prompts import rows

SIZES = (1, 8, 32, 128, 512)
PROMPTS, LENGTH = 24, 48
SAMPLERS = ("bf16", "int8", "int4-32")


@torch.no_grad()
def main(folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = [[{"role": "user", "content": row["prompt"]}] for row in rows()[:PROMPTS]]
    prompts = [tokenizer.apply_chat_template(t, add_generation_prompt=True, return_dict=False) for t in texts]
    for name in SAMPLERS:
        sampler = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for key, weight in sampler.named_parameters():
            if name == "bf16":
                weight.copy_(weight.bfloat16())
            elif is_quantizable(key, weight):
                weight.copy_(quantized(weight, QUANTIZATIONS[name].weights))
        left, mass, drift = dict.fromkeys(SIZES, 0.0), dict.fromkeys(SIZES, 0.0), 0.0
        torch.manual_seed(0)
        for prompt in prompts:
            ids = sampler.generate(torch.tensor([prompt]), max_new_tokens=LENGTH, do_sample=True, top_k=0, top_p=1.0)
            q, p = (m(ids).logits[0, len(prompt) - 1 : -1].double().softmax(-1) for m in (sampler, exact))
            drift += float((q - p).square().sum())
            for k in SIZES:
                top = q.topk(k).indices
                alpha = (1 - q.gather(1, top).sum(1)) / (1 - p.gather(1, top).sum(1))
                rest = (q - alpha[:, None] * p).scatter(1, top, 0)
                left[k] += float(rest.square().sum())
                mass[k] += float(q.gather(1, top).sum(1).mean()) / PROMPTS
        shares = (f"{(left[k] / drift) ** 0.5:.1%} ({mass[k]:.3f})" for k in SIZES)
        print(f"| {name} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
