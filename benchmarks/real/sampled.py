"""Short dumps of a real model whose fault needs sampling or scoring of its own, and healthy ones that look like them.

    python benchmarks/real/sampled.py runs/real/smollm2 runs/real/sampled           # two hours; goes on after a stop
    python benchmarks/real/sampled.py runs/real/smollm2 runs/real/sampled 2 3 4     # other seeds

The embedded engine samples in bf16, transformers scores in fp32, as in benchmarks/diagnosis/traps. Version 8 of the
weights is the checkpoint after eight updates of REINFORCE, version 4 is after four, version 0 the checkpoint.
Dumps of seed 0 are for finding limits, those of seed 1 (`aside`) for judging limits that were found without them.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))
from diagnosis.traps.dumps import BITS, with_columns, write
from diagnosis.traps.faults import Draw, changed, drawing
from diagnosis.traps.scoring import dump_of, score
from megatron_rc.analyze.chunk import Chunk, join
from megatron_rc.engine import Sample, SamplingParams
from megatron_rc.models.config import hf_config_dict
from megatron_rc.rollout.embedded import engine
from megatron_rc.rollout.embedded.model import build_model, weight_slots
from megatron_rc.rollout.quantize import quantized
from megatron_rc.settings.model import ModelSettings
from megatron_rc.settings.quantization import QUANTIZATIONS
from megatron_rc.tasks.chat import Chat
from real.prompts import rows

Weights = dict[str, Tensor]
RESPONSES, LENGTH, TURN = 2, 64, 40
UPDATES, RATE = 8, 2e-5
SERVERS = np.array([f"server {number}" for number in range(8)])
TOOL = "<|im_end|>\n<|im_start|>user\nThank you. Say it again in other words.<|im_end|>\n<|im_start|>assistant\n"


def penalty(size: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The repetition penalty of engines: positive logits of ids that came are divided by it, negative multiplied."""
    return lambda z, seen: torch.where(seen > 0, torch.where(z > 0, z / size, z * size), z)


def cut(*, top_p: float = 1.0, top_k: int = -1) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda z, seen: z.masked_fill(~engine.kept_ids(z, top_k, top_p), float("-inf"))


def min_p(share: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda z, seen: z.masked_fill(z < z.amax(-1, keepdim=True) + float(np.log(share)), float("-inf"))


def bias(z: Tensor, seen: Tensor) -> Tensor:
    """+1 on every 16th id."""
    z = z.clone()
    z[:, ::16] += 1.0
    return z


class Lab:
    """One model, its versions, and dumps of it."""

    def __init__(self, folder: str, kept: Path, seed: int) -> None:
        self.seed, self.chat = seed, Chat(folder)
        self.config = hf_config_dict(ModelSettings(hf_path=folder))
        self._kept, self._folder = kept, folder
        texts = [row["prompt"] for row in rows()]
        mine = np.random.default_rng(seed).permutation(len(texts))[:24]
        self.prompts = self.chat.encode([texts[number] for number in mine])

    def weights(self, version: int) -> Weights:
        """Those after ``version`` updates, made when they are wanted first."""
        base = load_file(Path(self._folder) / "model.safetensors")
        if version == 0:
            return base
        file = self._kept / f"version-{version}.safetensors"
        if not file.exists():
            self._train(base)
        return base | load_file(file)

    def model(self, weights: Weights, **config: Any) -> Any:
        model = build_model(self.config | config, torch.float32, torch.device("cpu"))
        slots = weight_slots(model)
        for name, tensor in weights.items():
            slots[name].copy_(tensor)
        return model

    def _train(self, base: Weights) -> None:
        model = self.model(base).requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
        prompts = self.chat.encode([row["prompt"] for row in rows()])
        for update in range(1, UPDATES + 1):
            mine = [prompts[(6 * update + number) % len(prompts)] for number in range(6)]
            samples = self.sample(dict(weight_slots(model)), prompts=mine, seeds=7_000_000 + 100 * update)
            # a reward that training can raise: short words
            words = [self.chat.decode(sample.output_ids).split() or ["none at all"] for sample in samples]
            reward = np.array([np.mean([len(word) < 5 for word in said]) for said in words])
            reward = (reward.reshape(-1, RESPONSES) - reward.reshape(-1, RESPONSES).mean(1, keepdims=True)).reshape(-1)
            for sample, advantage in zip(samples, np.sign(reward), strict=True):
                ids = torch.tensor([sample.prompt_ids + sample.output_ids])
                logits = model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1]
                chosen = logits.log_softmax(-1).gather(-1, torch.tensor(sample.output_ids)[:, None])
                (-float(advantage) * chosen.mean() / len(samples)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if update in (4, UPDATES):
                self._kept.mkdir(parents=True, exist_ok=True)
                kept = {name: tensor.detach().clone() for name, tensor in weight_slots(model).items()}
                save_file(kept, self._kept / f"version-{update}.safetensors")
            print(f"update {update}", file=sys.stderr, flush=True)

    def sample(
        self,
        weights: Weights,
        *,
        prompts: Sequence[Sequence[int]] | None = None,
        draw: Draw | None = None,
        n: int = RESPONSES,
        length: int = LENGTH,
        seeds: int | None = None,
        config: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> list[Sample]:
        """Responses in bf16; each ends at its stop token, which the engine does not know: its batch stays whole."""
        made = engine.EmbeddedEngine(self.config | (config or {}), dtype="bf16", device="cpu")
        made.update_weights(weights.items(), 0)
        prompts = self.prompts if prompts is None else prompts
        first = 100_000 * (self.seed + 1) if seeds is None else seeds
        params = SamplingParams(max_new_tokens=length, **sampling)
        with drawing(draw):
            samples = made.generate(prompts, params, n=n, seeds=range(first, first + n * len(prompts)))
        made.close()
        return [self._ended(sample) for sample in samples]

    def _ended(self, sample: Sample) -> Sample:
        stops = set(self.chat.stop_token_ids)
        end = next((t + 1 for t, token in enumerate(sample.output_ids) if token in stops), 0)
        if not end:
            return sample
        ids, logs = sample.output_ids[:end], sample.logprobs[:end]
        return replace(sample, output_ids=ids, logprobs=logs, finish_reason="stop", weight_versions=[(0, 0, end)])

    def dump(self, samples: Sequence[Sample], model: Any, n: int = RESPONSES, **scoring: Any) -> Chunk:
        scores, order = score(model, samples, **scoring), np.arange(len(samples))
        step, server = order * 2 // len(samples), SERVERS[order % len(SERVERS)]
        return dump_of(samples, scores, step=step, group=order // n, server=server)

    def two_turns(self, trainer: Weights, *, positions: int = 0, again: bool = False) -> Chunk:
        """Two answers with a message in between; the trainer's positions of the second are off, or its first answer
        is encoded again."""
        first = self.sample(trainer, length=TURN, n=1)
        between = self.chat._tokenizer(TOOL, add_special_tokens=False)["input_ids"]
        prompts = [[*s.prompt_ids, *self._open(s), *between] for s in first]
        second = self.sample(trainer, prompts=prompts, length=TURN, n=1, seeds=900_000 + self.seed)
        model, parts = self.model(trainer), []
        for number, (one, two) in enumerate(zip(first, second, strict=True)):
            ids = self._open(one)
            seen = self.chat._tokenizer(self.chat.decode(ids), add_special_tokens=False)["input_ids"] if again else ids
            row = torch.tensor([[*one.prompt_ids, *seen, *between, *two.output_ids]])
            places = torch.arange(row.shape[1])[None].clone()
            places[0, row.shape[1] - len(two.output_ids) - len(between) :] += positions
            with torch.inference_mode():
                late = _of(model(input_ids=row, position_ids=places).logits[0].float(), two.output_ids)
                early = _of(model(input_ids=torch.tensor([[*one.prompt_ids, *ids]])).logits[0].float(), ids)
            gap = np.zeros(len(between))
            log_pi, entropy = (np.concatenate([early[i], gap, late[i]]) for i in (0, 1))
            log_mu = np.concatenate([one.logprobs[: len(ids)], gap, two.logprobs])
            mask = np.concatenate([np.ones(len(ids)), gap, np.ones(len(two.output_ids))]).astype(bool)
            tokens = {"entropy": entropy, "loss_mask": mask, "token_id": np.array([*ids, *between, *two.output_ids])}
            prompt = np.array([len(one.prompt_ids)])
            sequences = {"step": np.array([0]), "group": np.array([number]), "prompt_length": prompt}
            parts.append(Chunk(log_pi, log_mu, np.array([0, len(log_pi)]), tokens, sequences))
        return join(parts)

    def _open(self, sample: Sample) -> list[int]:
        """The answer without its stop token, which the message in between begins with."""
        return sample.output_ids[:-1] if sample.output_ids[-1] in self.chat.stop_token_ids else sample.output_ids


def _of(logits: Tensor, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """([T] log-probs of the last ids, their entropies) of logits [N, V] of the whole row."""
    table = logits[-len(ids) - 1 : -1].log_softmax(-1)
    chosen = table.gather(-1, torch.tensor(list(ids))[:, None])[:, 0]
    return chosen.double().numpy(), -(table.exp() * table).sum(-1).double().numpy()


def labelled(chunk: Chunk, version: int) -> Chunk:
    trained = np.full(chunk.num_sequences, UPDATES)
    return with_columns(chunk, version=np.full(chunk.log_pi.size, version), trainer_version=trained)


def makers(lab: Lab) -> dict[str, Callable[[], Chunk]]:
    """Name -> a dump; healthy ones begin with `healthy`."""
    new = lab.weights(UPDATES)
    old = {4: lab.weights(4), 0: lab.weights(0)}

    def plain(draw: Draw | None = None, weights: Weights = new, config: Any = None, **sampling: Any) -> Chunk:
        samples = lab.sample(weights, draw=draw, config=config, **sampling)
        return lab.dump(samples, lab.model(new), temperature=sampling.get("temperature", 1.0))

    def wrong_prompts(change: Callable[[list[int]], list[int]]) -> Chunk:
        samples = lab.sample(new)
        return lab.dump(samples, lab.model(new), prompts=[change(list(s.prompt_ids)) for s in samples])

    def mixed(share: int) -> Chunk:
        """Server ``share`` of eight has version 0."""
        fresh, stale = lab.sample(new), lab.sample(old[0])
        served = [b if i % 8 == share else a for i, (a, b) in enumerate(zip(fresh, stale, strict=True))]
        return lab.dump(served, lab.model(new))

    def shard() -> Weights:
        name, rows_ = "model.embed_tokens.weight", new["model.embed_tokens.weight"].shape[0]
        here = slice(rows_ * 3 // 8, rows_ * 4 // 8)
        table = new[name].clone()
        table[here] = old[0][name][here]
        return new | {name: table}

    def attention_of(version: int) -> Weights:
        return new | {name: old[version][name] for name in new if "self_attn" in name}

    def one_layer_fp8() -> Weights:
        grid = QUANTIZATIONS["fp8-tensor"].weights
        assert grid is not None
        return {n: quantized(t, grid) if ".layers.7." in n and t.ndim == 2 else t for n, t in new.items()}

    def kept(chosen: Callable[[Sample], bool]) -> Chunk:
        return lab.dump([s for s in lab.sample(new, n=4) if chosen(s)], lab.model(new), n=1)

    def lags(label: bool) -> Chunk:
        """A third of the responses each from versions 8, 4 and 0."""
        parts = [lab.sample(w) for w in (new, old[4], old[0])]
        samples = [parts[i % 3][i] for i in range(len(parts[0]))]
        chunk = lab.dump(samples, lab.model(new))
        versions = np.array([8, 4, 0])[np.arange(chunk.num_sequences) % 3][chunk.sequence_of]
        columns = {"version": versions, "trainer_version": np.full(chunk.num_sequences, 8)}
        return with_columns(chunk, **columns) if label else chunk

    both = {"temperature-0.9": lambda z, seen: z / 0.9, "top-p-0.95": cut(top_p=0.95), "top-k-20": cut(top_k=20)}
    both |= {"min-p-0.05": min_p(0.05), "penalty-1.1": penalty(1.1)}
    more = {"penalty-1.2": penalty(1.2), "bias": bias}
    return {
        "healthy-bf16": plain,
        **{f"healthy-t{each}": partial(plain, temperature=each) for each in (0.3, 0.7, 1.3)},
        "healthy-turns": lambda: lab.two_turns(new),
        "healthy-lag-4-labelled": lambda: labelled(plain(weights=old[4]), 4),
        "healthy-lag-8-labelled": lambda: labelled(plain(weights=old[0]), 0),
        "healthy-lags-labelled": lambda: lags(True),
        **{f"hidden-{name}": partial(plain, changed(change, shown=False)) for name, change in both.items()},
        **{f"logged-{name}": partial(plain, changed(change, shown=True)) for name, change in (both | more).items()},
        "another-prompt": lambda: wrong_prompts(lambda ids: lab.prompts[lab.prompts.index(ids) - 1]),
        "system-missing": lambda: wrong_prompts(lambda ids: ids[ids.index(1, 1) :]),
        "fresh-label-lag-4": lambda: labelled(plain(weights=old[4]), 8),
        "fresh-label-lag-8": lambda: labelled(plain(weights=old[0]), 8),
        "unlabelled-lag-8": lambda: plain(weights=old[0]),
        "one-server-stale": lambda: mixed(5),
        "shard-stale": lambda: plain(weights=shard()),
        "adapter-missing": lambda: plain(weights=attention_of(0)),
        "rope-theta": lambda: plain(config={"rope_theta": 20_000.0, "rope_parameters": None}),
        "norm-eps": lambda: plain(config={"rms_norm_eps": 1e-3}),
        "layer-fp8": lambda: plain(weights=one_layer_fp8()),
        "turn-positions": lambda: lab.two_turns(new, positions=24),
        "turns-encoded-again": lambda: lab.two_turns(new, again=True),
        "right-answers-kept": lambda: kept(lambda s: "\n" in lab.chat.decode(s.output_ids)),
        "slow-answers-dropped": lambda: kept(lambda s: len(s.output_ids) < LENGTH),
    }


def main(model: str, out: Path, seeds: Sequence[int]) -> None:
    for seed in seeds:
        lab = Lab(model, out, seed)
        for name, make in makers(lab).items():
            file = out / f"{name}-s{seed}{'-aside' * (seed == 1)}.parquet"
            if not file.exists():
                write(make(), file, bits=BITS)
                print(file.name, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [int(seed) for seed in sys.argv[3:]] or [0, 1])
