"""The embedded engine: a transformers model, decoded in batches with a KV cache."""

import contextlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache

from megatron_rc.engine import HiddenSampling, OnFinished, Prompts, RolloutEngine, Sample, SamplingParams, check_request
from megatron_rc.models.config import torch_dtype
from megatron_rc.rollout.embedded.model import build_model, weight_slots
from megatron_rc.rollout.embedded.rounding import RoundedCache, multiply_in_fp32, round_inputs
from megatron_rc.rollout.embedded.routes import RouteCapture
from megatron_rc.rollout.opening import Opening
from megatron_rc.rollout.worker import WorkerEngine
from megatron_rc.settings.model import DTYPES, Dtype
from megatron_rc.settings.quantization import QUANTIZATIONS, Quantize

_COMPACT_SHARE = 1 / 8
"""Finished rows leave the batch once they are this share of it: copying the cache costs about a tenth of a step."""


class EmbeddedEngine(RolloutEngine):
    """RolloutEngine that samples in this process from a transformers model.

    Token t of a response is drawn by inverting the cumulative distribution at the t-th uniform number of a generator
    with the response's own seed. The rest of the batch changes a response only through the rounding of matrix products.
    """

    def __init__(
        self,
        hf_config: dict[str, Any],
        *,
        dtype: Dtype,
        device: torch.device | str,
        max_batch: int = 256,
        return_routes: bool = False,
        quantize: Quantize = "none",
        name: str = "embedded",
    ) -> None:
        """Build the model with random weights; they are version -1 until ``update_weights``.

        Args:
            hf_config: content of a Hugging Face config.json, with a model_type of `models.families`.
            dtype: of weights, activations, cache and logits; log-probs are always fp32.
            max_batch: responses decoded at once.
            return_routes: return the experts of every token; the model must have experts.
            quantize: what to round besides weights, which come rounded.
            name: ``Sample.server`` of its responses.

        Raises:
            ValueError: the model_type or dtype is unknown, attention has a sliding window, max_batch < 1, routes are
                wanted of a dense model, or rounded inputs of one with experts.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if max_batch < 1:
            raise ValueError(f"max_batch must be >= 1, got {max_batch!r}")
        self.device = torch.device(device)
        self.max_batch = max_batch
        self.weight_version = -1
        self._name, self._syncs = name, 0
        self._model = build_model(hf_config, torch_dtype(dtype), self.device)
        self._slots = weight_slots(self._model)
        self._routes = RouteCapture(self._model) if return_routes else None
        quantization = QUANTIZATIONS[quantize] if quantize != "none" else None
        self._cache_dtype = quantization.cache if quantization else ""
        if dtype != "fp32" and self.device.type == "cpu" and not torch.cpu._is_amx_tile_supported():
            multiply_in_fp32(self._model)
        if quantization:
            round_inputs(self._model, quantization)

    def generate(
        self, prompts: Prompts, params: SamplingParams, *, n: int, seeds: Sequence[int], on_finished: OnFinished = None
    ) -> list[Sample]:
        """Sample ``n`` responses per prompt; the contract is RolloutEngine.generate."""
        config = self._model.config
        check_request(
            prompts, params, n=n, seeds=seeds, vocabulary=config.vocab_size, context=config.max_position_embeddings
        )
        samples: dict[int, Sample] = {}
        # prompts of similar length need little padding
        order = sorted(range(len(prompts) * n), key=lambda row: len(prompts[row // n]))
        for start in range(0, len(order), self.max_batch):
            rows = order[start : start + self.max_batch]
            batch, its_seeds = [prompts[row // n] for row in rows], [seeds[row] for row in rows]
            with torch.inference_mode():
                samples.update(zip(rows, self._decode(batch, params, its_seeds, on_finished), strict=True))
        return [samples[row] for row in range(len(prompts) * n)]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy every weight into the model, cast to its dtype, and serve them as ``version``.

        Args:
            weights: (name as in a Hugging Face checkpoint, tensor); a tied lm_head.weight is not among them.

        Raises:
            ValueError: naming a tensor that is unknown, given twice, of another shape, or missing. The model is then
                partly updated and must not be sampled from.
        """
        missing = dict.fromkeys(self._slots)
        for name, tensor in weights:
            if name not in self._slots:
                raise ValueError(f"weight {name!r} is not a parameter of the model")
            if name not in missing:
                raise ValueError(f"weight {name!r} was given twice")
            slot = self._slots[name]
            if tensor.shape != slot.shape:
                raise ValueError(f"weight {name!r} must have shape {tuple(slot.shape)}, got {tuple(tensor.shape)}")
            slot.copy_(tensor.detach())
            del missing[name]
        if missing:
            raise ValueError(f"weight {next(iter(missing))!r} is missing ({len(missing)} of {len(self._slots)} are)")
        self.weight_version = version
        self._syncs += 1

    def close(self) -> None:
        self._slots.clear()
        del self._model

    def _decode(
        self, prompts: Prompts, params: SamplingParams, seeds: Sequence[int], on_finished: OnFinished
    ) -> list[Sample]:
        rows, steps, device = len(prompts), params.max_new_tokens, self.device
        config, rounded = self._model.config, self._cache_dtype
        cache = RoundedCache(config, rounded) if rounded else DynamicCache(config=config)
        if self._routes:
            self._routes.start(rows, max(map(len, prompts)) + steps - 1)
        logits, visible, positions = self._prefill(prompts, steps, cache)
        uniforms = _uniforms(seeds, steps).to(device)
        stops = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=device)
        tokens = torch.zeros(rows, steps, dtype=torch.int64, device=device)
        logprobs = torch.zeros(rows, steps, device=device)
        support: list[list[Tensor]] = [[] for _ in range(rows)]
        top_ids = torch.full((rows, steps, params.top_logprobs), -1, dtype=torch.int32, device=device)
        top_logprobs = torch.zeros(top_ids.shape, device=device)
        live = torch.arange(rows, device=device)
        ended = torch.zeros(rows, dtype=torch.bool, device=device)
        prompt_width = visible.shape[1] - steps
        for step in range(steps):
            drawn = draw(logits, params, uniforms[live, step])
            tokens[live, step], logprobs[live, step] = drawn.ids, drawn.logprobs
            if drawn.top is not None:
                values, indices = drawn.top
                top_logprobs[live, step] = values
                top_ids[live, step] = indices.int().masked_fill(values == float("-inf"), -1)
            if drawn.kept is not None:
                kept_ids_of_rows = drawn.kept.nonzero()[:, 1].cpu().split(drawn.kept.sum(-1).tolist())
                for row, kept in zip(live.tolist(), kept_ids_of_rows, strict=True):
                    support[row].append(kept)
            running_before = len(ended) - int(ended.sum())
            ended = ended | torch.isin(drawn.ids, stops)
            running = len(ended) - int(ended.sum()) if step < steps - 1 else 0
            if running < running_before and on_finished is not None:
                on_finished(running_before - running)
            if running == 0:
                break
            ids = drawn.ids
            if running <= (1 - _COMPACT_SHARE) * len(ended):
                kept_rows = (~ended).nonzero()[:, 0]
                cache.batch_select_indices(kept_rows)
                live, ended, ids = live[kept_rows], ended[kept_rows], ids[kept_rows]
                visible, positions = visible[kept_rows], positions[kept_rows]
            mask = visible[:, None, None, : prompt_width + step + 1]
            with _fast_single_query_attention(device):
                logits = self._forward(ids[:, None], positions[:, None] + step, mask, cache)
            if self._routes:
                self._routes.keep(live, prompt_width + step)
        return self._samples(prompts, params, tokens, logprobs, support, (top_ids.cpu(), top_logprobs.cpu()))

    def _prefill(self, prompts: Prompts, steps: int, cache: DynamicCache) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the distinct prompts, left-padded, and spread them over the rows that share them.

        Returns:
            [B, V] logits of the first token, [B, W + steps] bool columns of the cache that a row may see, [B] int64
            prompt lengths.
        """
        numbers: dict[tuple[int, ...], int] = {}
        which = [numbers.setdefault(tuple(prompt), len(numbers)) for prompt in prompts]
        lengths = torch.tensor([len(prompt) for prompt in numbers], device=self.device)
        width = int(lengths.max())
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in numbers], device=self.device)
        columns = torch.arange(width + steps, device=self.device)
        visible = columns >= (width - lengths)[:, None]
        causal = columns[:width, None] >= columns[None, :width]
        # padding sees itself: a row of the mask without a single True is NaN in some attention kernels
        itself = torch.eye(width, dtype=torch.bool, device=self.device)
        mask = (causal & visible[:, None, None, :width]) | itself
        positions = (columns[:width] - (width - lengths)[:, None]).clamp(min=0)
        logits = self._forward(ids, positions, mask, cache)
        rows = torch.tensor(which, device=self.device)
        if self._routes:
            self._routes.keep(torch.arange(len(rows), device=self.device), 0, of=rows)
        cache.batch_select_indices(rows)
        return logits[rows], visible[rows], lengths[rows]

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        own = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        return self._model(input_ids=ids, position_ids=positions, attention_mask=mask, **own).logits[:, -1]

    def _samples(
        self,
        prompts: Prompts,
        params: SamplingParams,
        tokens: Tensor,
        logprobs: Tensor,
        support: list[list[Tensor]],
        top: tuple[Tensor, Tensor],
    ) -> list[Sample]:
        samples = []
        stops, width = set(params.stop_token_ids), max(map(len, prompts))
        columns = zip(prompts, tokens.tolist(), logprobs.tolist(), support, strict=True)
        for row, (prompt, ids, values, kept) in enumerate(columns):
            # rows that ended before the batch was compacted hold draws after their stop token
            length = next((t + 1 for t, token in enumerate(ids) if token in stops), len(ids))
            its_top = [part[row, :length].clone() for part in top] if params.top_logprobs else [None, None]
            samples.append(
                Sample(
                    prompt_ids=list(prompt),
                    output_ids=ids[:length],
                    logprobs=values[:length],
                    finish_reason="stop" if ids[length - 1] in stops else "length",
                    weight_versions=[(self.weight_version, 0, length)],
                    server=self._name,
                    syncs=self._syncs,
                    support=[one.tolist() for one in kept[:length]] if params.truncates else None,
                    top_ids=its_top[0],
                    top_rollout_logprobs=its_top[1],
                    routes=self._routes.of(row, width - len(prompt), width + length - 1) if self._routes else None,
                )
            )
        return samples


def open_engine(opening: Opening) -> RolloutEngine:
    """The engine in this process, or in one of its own if it samples while the trainer computes."""
    build = partial(
        EmbeddedEngine,
        opening.hf_config,
        dtype=opening.settings.dtype,
        device=opening.device,
        return_routes=opening.returns_routes,
        quantize=opening.settings.quantize,
        name=f"embedded-{opening.rank}",
    )
    return WorkerEngine(build, agree=opening.agree) if opening.in_background else build()


class Drawn(NamedTuple):
    """One token per row."""

    ids: Tensor
    """[B] int64."""
    logprobs: Tensor
    """[B] fp32, nats."""
    kept: Tensor | None
    """[B, V] bool, the set drawn from under top-p/top-k, else None."""
    top: Any = None
    """[B, k] values and indices of the largest log-probs; None where k is 0."""


def draw(logits: Tensor, params: SamplingParams, uniforms: Tensor) -> Drawn:
    """Draw one token per row by inverting its cumulative distribution.

    token = min{i : sum_{j <= i} p_j > u}, p = softmax(logits / temperature over the kept ids), in fp64;
    ``params.hidden`` changes p, and neither the log-probs nor the kept ids.

    Args:
        logits: [B, V] any float dtype.
        uniforms: [B] fp64 in [0, 1).
    """
    scaled = logits.float() / params.temperature
    kept = kept_ids(scaled, params.top_k, params.top_p) if params.truncates else None
    if kept is not None:
        scaled = scaled.masked_fill(~kept, float("-inf"))
    # log_softmax of a CPU adds 49,152 terms one by one in fp32, and is then too large by up to 2e-5 nats
    logprobs = scaled - scaled.logsumexp(-1, keepdim=True)
    drawn_from = logprobs if params.hidden is None else _hidden_logprobs(scaled, params.hidden)
    cumulative = drawn_from.double().exp_().cumsum(-1)
    # u <= 1 - 2^-53 keeps the product below the total after rounding: the id has positive probability
    ids = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)
    # a row of NaN has no order: any id will do, its log-prob is NaN and the trainer drops it
    ids = ids.clamp_(max=logits.shape[-1] - 1)
    top = logprobs.topk(params.top_logprobs, -1) if params.top_logprobs else None
    return Drawn(ids[:, 0], logprobs.gather(-1, ids)[:, 0], kept, top)


def _hidden_logprobs(scaled: Tensor, hidden: HiddenSampling) -> Tensor:
    scaled = scaled / hidden.temperature
    if hidden.top_p < 1:
        scaled = scaled.masked_fill(~kept_ids(scaled, -1, hidden.top_p), float("-inf"))
    return scaled.log_softmax(-1)


def kept_ids(scaled: Tensor, top_k: int, top_p: float) -> Tensor:
    """The ids that remain after top-k, then top-p.

    Top-k keeps the k largest; of equal logits the lower id. Top-p keeps an id while the mass before it, in descending
    order and renormalised after top-k, is < top_p: the smallest set whose mass reaches top_p.

    Args:
        scaled: [B, V] fp32 logits / temperature.
        top_k: -1 keeps all.

    Returns:
        [B, V] bool, at least one True per row.
    """
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(scaled, dtype=torch.bool)
    if top_k != -1:
        keep[:, top_k:] = False
        ordered[:, top_k:] = float("-inf")
    if top_p < 1:
        probabilities = ordered.softmax(-1, dtype=torch.float64)
        keep &= probabilities.cumsum(-1) - probabilities < top_p
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter_(-1, order, keep)


def _fast_single_query_attention(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """On a CPU the plain kernel computes a single query 2 times as fast as the blocked one in bf16, 4 times in fp16."""
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else contextlib.nullcontext()


def _uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """[len(seeds), count] fp64 in [0, 1); row i depends only on seeds[i], on any device."""
    generator = torch.Generator()
    return torch.stack([torch.rand(count, dtype=torch.float64, generator=generator.manual_seed(s)) for s in seeds])
