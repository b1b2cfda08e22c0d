"""Steps of TRL's GRPOTrainer on CPU, its own and the subclass of the page; a rollout function stands for vLLM."""

import json
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from rc_trl import CorrectedGRPOTrainer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from megatron_rc import RolloutCorrection

WORDS = ["<pad>", "<eos>", *"abcdefghijklmn"]
STEPS = 3


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "head_dim": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    ids = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **ids, max_position_embeddings=32))


def sample(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
    """Responses of 2 to 7 tokens with the log-probs of a sampler that is off by noise; every second token is a tool's.

    The same for every trainer at the same step and weights.
    """
    random = torch.Generator().manual_seed(100 + trainer.state.global_step)
    prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    completions, logprobs, masks = [], [], []
    for prompt in prompt_ids:
        length = int(torch.randint(2, 8, (), generator=random))
        response = torch.randint(2, len(WORDS), (length,), generator=random)
        with torch.no_grad():
            logits = trainer.model(torch.tensor([[*prompt, *response.tolist()]])).logits[0, len(prompt) - 1 : -1]
        exact = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        completions.append(response.tolist())
        logprobs.append((exact + 0.5 * torch.randn(length, generator=random)).tolist())
        masks.append([index % 2 for index in range(length)][::-1])
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs, "env_mask": masks}


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(text.count("a") + text.count("b")) for text in completions]


def steps(kind: type[GRPOTrainer], correction: RolloutCorrection | None = None, **options: Any) -> dict[str, Any]:
    """The host's log of every step, and the sum of the absolute weights after them."""
    cpu = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none"}
    batch = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "gradient_accumulation_steps": 2}
    run = {"max_steps": STEPS, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "seed": 1}
    rest = {"num_generations": 4, "max_completion_length": 8, "beta": 0.0, "disable_tqdm": True, "loss_type": "dapo"}
    args = GRPOConfig(output_dir=mkdtemp(), **cpu, **batch, **run, **rest, **options)
    prompts = Dataset.from_dict({"prompt": ["c d", "e", "f g h", "a b"]})
    made = {"model": model(), "processing_class": tokenizer(), "train_dataset": prompts}
    trainer = kind(args=args, reward_funcs=reward, rollout_func=sample, **made)
    # what use_vllm=True sets, without its engine
    trainer.use_vllm = True
    trainer.vllm_generation, trainer._last_loaded_step = SimpleNamespace(sync_weights=lambda: None), -1
    if correction is not None:
        trainer.correction = correction
    trainer.train()
    log = [{name: value for name, value in line.items() if "time" not in name} for line in trainer.state.log_history]
    total = sum(parameter.double().abs().sum().item() for parameter in trainer.model.parameters())
    return {"log": log[:STEPS], "weights": total}


def main() -> None:
    mode, bound = "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"
    sequences = RolloutCorrection.from_dict({"weight": {"level": "sequence", "upper": 1.2}})
    found = {
        "own token": steps(GRPOTrainer, **{mode: "token_truncate", bound: 2.0}),
        "ours token": steps(CorrectedGRPOTrainer),
        "own sequence": steps(GRPOTrainer, **{mode: "sequence_truncate", bound: 1.2}),
        "ours sequence": steps(CorrectedGRPOTrainer, sequences),
        "own none": steps(GRPOTrainer, vllm_importance_sampling_correction=False),
        "ours none": steps(CorrectedGRPOTrainer, RolloutCorrection.preset("none")),
    }
    print("ANSWER", json.dumps(found))


if __name__ == "__main__":
    main()
