"""What a step pays for the dump that every run keeps: CPU seconds of a training step with it and without it.

    python benchmarks/dump_cost.py
    python benchmarks/dump_cost.py --top-p --pairs 10 --profile

One process on one core trains a small Qwen3 on one rollout batch again and again, with the dump and without it in
turns. Seconds are CPU time of all threads, so that other programs count little, and a step with the dump includes
writing its file. The rollout, which a real step has besides, would make every share smaller. What the dump adds is less
than the noise of a step, so it is also timed by itself: the work in the step's thread, that of all threads, and under
--top-p the pass over the logits for kept_mass, which dump.kept_mass asks for.
"""

from __future__ import annotations

import argparse
import cProfile
import math
import pstats
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from megatron_rc.batch import TokenBatch
from megatron_rc.config import PRESETS
from megatron_rc.dump import DumpWriter
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.logprobs import vocab_parallel_distribution
from megatron_rc.settings import JobSettings, LossSettings, ModelSettings, ParallelSettings, TrainSettings
from megatron_rc.training import groups as parallel
from megatron_rc.training.checkpoint import Progress
from megatron_rc.training.observers import Observers
from megatron_rc.training.policy import Policy
from megatron_rc.training.step.reinforce import StepResult, reinforce_step
from megatron_rc.training.step.sampling import SampledBatch

PROMPT, RESPONSES_PER_PROMPT, KEPT_IDS = 32, 8, 200
"""KEPT_IDS: of each token under --top-p."""


def model(vocabulary: int) -> ModelSettings:
    config = {
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    return ModelSettings(config=config)


def rollout(vocabulary: int, sequences: int, tokens: int, top_p: bool) -> tuple[SampledBatch, TokenBatch]:
    """Random responses of an honest length."""
    random = np.random.default_rng(1)
    params = SamplingParams(max_new_tokens=tokens, top_k=KEPT_IDS if top_p else -1)

    def sample() -> Sample:
        ids = random.integers(vocabulary, size=tokens).tolist()
        kept = [sorted({i, *random.integers(vocabulary, size=KEPT_IDS - 1).tolist()}) for i in ids] if top_p else None
        prompt = random.integers(vocabulary, size=PROMPT).tolist()
        # about what a model says that has learned nothing
        logprobs = (-math.log(KEPT_IDS if top_p else vocabulary) + random.normal(0, 0.1, tokens)).tolist()
        return Sample(prompt, ids, logprobs, "length", [(0, 0, tokens)], kept, server="a", syncs=1, cached_tokens=0)

    samples = [sample() for _ in range(sequences)]
    rewards, groups = random.random(sequences).tolist(), [i // RESPONSES_PER_PROMPT for i in range(sequences)]
    batch = TokenBatch.from_samples(samples, params, rewards=rewards, groups=groups)
    return SampledBatch(samples, rewards, groups, [*range(sequences)]), batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96, help="of a response")
    parser.add_argument("--pairs", type=int, default=10, help="steps with the dump, and as many without it")
    parser.add_argument("--top-p", action="store_true", help=f"{KEPT_IDS} kept ids per token")
    parser.add_argument("--profile", action="store_true", help="also print where the time of a dump goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sampled, batch = rollout(options.vocabulary, options.sequences, options.tokens, options.top_p)
    train, here = TrainSettings(), parallel.initialize(ParallelSettings(), seed=1)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(Policy(model(options.vocabulary), ParallelSettings(), train, here)) as policy,
    ):
        policy.start_phase(lr=1e-6, min_lr=1e-6, warmup_steps=0, total_steps=1000, decay_style="constant")
        observers = Observers(JobSettings(output=str(Path(folder) / "run")), writer=True, dumps=False)

        def step() -> StepResult:
            return reinforce_step(
                policy,
                batch,
                correction=PRESETS["token-tis"].correction,
                loss=LossSettings(),
                train=train,
                max_nonfinite_share=0.01,
            )

        whole: dict[bool, list[float]] = {True: [], False: []}
        parts: dict[str, list[float]] = {"kept_mass": [], "step's thread": [], "all threads": []}
        for pair in range(options.pairs + 1):
            # in turns, so that neither is always the first
            for dumped in (pair % 2 == 0, pair % 2 == 1):
                started = time.process_time()
                result = step()
                trained = time.process_time()
                here_started = time.thread_time()
                if dumped:
                    observers.dump(Progress(phase="rl", step=pair + 1), sampled, result, here)
                    parts["step's thread"].append(time.thread_time() - here_started)
                    observers.finish_dump()
                    parts["all threads"].append(time.process_time() - trained)
                whole[dumped].append(time.process_time() - started)
            if options.top_p:
                parts["kept_mass"].append(extra_of_kept_mass(policy, batch))
        on, off = (statistics.median(whole[dumped][1:]) for dumped in (True, False))
        shares = sorted(x / y - 1 for x, y in zip(whole[True][1:], whole[False][1:], strict=True))
        low, _, high = statistics.quantiles(shares, n=4)
        print(
            f"vocabulary {options.vocabulary:,}, {batch.num_tokens:,} tokens, median of {options.pairs} pairs: "
            f"{off:.3f} s per step without the dump, {on:.3f} s with it ({on / off - 1:+.1%}, quartiles {low:+.1%} and "
            f"{high:+.1%})"
        )
        for name, values in parts.items():
            if values:
                spent = statistics.median(values[1:])
                print(f"  {name:<14}{1000 * spent:7.2f} ms, {spent / off:.2%} of a step")
        if options.profile:
            profile = cProfile.Profile()
            with tempfile.TemporaryDirectory() as again:
                columns = {name: values.cpu() for name, values in step().columns.items()}
                writer = DumpWriter(again)
                profile.enable()
                writer.write(1, batch, samples=sampled.samples, seeds=sampled.seeds, computed=columns, tokens=False)
                profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(12)


def extra_of_kept_mass(policy: Policy, batch: TokenBatch) -> float:
    """CPU seconds that kept_mass adds to the log-probs of a batch of logits."""
    assert batch.support is not None
    logits = torch.randn(batch.num_tokens, policy.hf_config["vocab_size"])
    spent = {}
    for with_kept_mass in (False, True):
        started = time.process_time()
        vocab_parallel_distribution(
            logits, batch.targets, mask=batch.loss_mask, support=batch.support, with_kept_mass=with_kept_mass
        )
        spent[with_kept_mass] = time.process_time() - started
    return spent[True] - spent[False]


if __name__ == "__main__":
    main()
