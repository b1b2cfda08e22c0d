"""The embedded engine against uncached, unpadded forwards of a transformers model with the same weights."""

import dataclasses
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from refusals import refuses
from route_sets import peak_memory
from safetensors.torch import load_file
from tiny_models import errors, reference_logits
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_rc.engine import HiddenSampling, RolloutEngine, Sample, SamplingParams
from megatron_rc.rollout.embedded.engine import EmbeddedEngine, draw

VOCABULARY = 24
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40,
    # wide enough for distributions that are far from uniform
    "initializer_range": 0.3,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "qwen3", **SHAPE},
    "biased": {"model_type": "qwen2", **SHAPE},
    "tied": {"model_type": "qwen3", **SHAPE, "tie_word_embeddings": True, "rope_theta": 1e6},
    "moe": {"model_type": "qwen3_moe", **SHAPE, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2,
            "norm_topk_prob": True, "mlp_only_layers": [0]},
}  # fmt: skip
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9], [3, 1, 4]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, dict[str, Tensor]]]:
    """Reference model with eager attention, and the checkpoint that transformers writes of it, by configuration."""

    @cache
    def make(kind: str) -> tuple[Any, dict[str, Tensor]]:
        folder = tmp_path_factory.mktemp(kind)
        torch.manual_seed(11)
        config = AutoConfig.for_model(**CONFIGS[kind])
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.data.uniform_(-1, 1)
        model.save_pretrained(folder)
        return model, load_file(folder / "model.safetensors")

    return make


def engine_of(kind: str, weights: dict[str, Tensor], *, dtype: Any = "fp32", max_batch: int = 256) -> EmbeddedEngine:
    engine = EmbeddedEngine(CONFIGS[kind], dtype=dtype, device="cpu", max_batch=max_batch)
    engine.update_weights(weights.items(), 4)
    return engine


@pytest.mark.parametrize("kind", CONFIGS)
def test_logprobs_are_those_of_a_full_forward_for_prompts_of_unequal_length(kind: str, pair: Any) -> None:
    model, weights = pair(kind)
    params = SamplingParams(max_new_tokens=9, temperature=0.7, stop_token_ids=(2, 7, 11), top_logprobs=5)
    samples = engine_of(kind, weights).generate(PROMPTS, params, n=6, seeds=range(30))
    for sample in samples:
        values, ids = (reference_logits(model, sample) / 0.7).log_softmax(-1).topk(5)
        assert torch.equal(sample.top_ids.long(), ids) and (sample.top_rollout_logprobs - values).abs().max() < 1e-5
    assert [s.prompt_ids for s in samples] == [p for p in PROMPTS for _ in range(6)]
    # rows that stop early leave the batch: both fates must occur for the comparison to mean anything
    assert {s.finish_reason for s in samples} == {"stop", "length"}
    assert len({len(s.output_ids) for s in samples}) >= 5
    assert errors(model, samples, 0.7).abs().max() < 1e-5
    assert errors(model, samples, 1.0).abs().max() > 0.1


def kept_by_hand(logits: list[float], temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """Kept ids and their log-probabilities, in plain Python."""
    weights = [math.exp(x / temperature) for x in logits]
    ranked = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if top_k != -1:
        ranked = ranked[:top_k]
    total = math.fsum(weights[i] for i in ranked)
    kept: list[int] = []
    for i in ranked:
        if math.fsum(weights[j] for j in kept) / total >= top_p:
            break
        kept.append(i)
    total = math.fsum(weights[i] for i in kept)
    return {i: math.log(weights[i] / total) for i in kept}


@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 0.8), (5, 1.0), (6, 0.7), (1, 1.0), (200, 1.0)])
def test_logprobs_are_renormalised_over_the_kept_ids(top_k: int, top_p: float, pair: Any) -> None:
    model, weights = pair("dense")
    params = SamplingParams(
        max_new_tokens=6, temperature=1.3, top_k=top_k, top_p=top_p, stop_token_ids=(2,), top_logprobs=6
    )
    sizes = set()
    for sample in engine_of("dense", weights).generate(PROMPTS, params, n=4, seeds=range(20)):
        assert sample.support is not None and len(sample.support) == len(sample.output_ids)
        assert sample.top_ids is not None and sample.top_rollout_logprobs is not None
        tops = zip(sample.top_ids.tolist(), sample.top_rollout_logprobs.tolist(), strict=True)
        columns = sample.output_ids, sample.logprobs, sample.support, [dict(zip(*rows, strict=True)) for rows in tops]
        for logits, token, logprob, kept, listed in zip(
            reference_logits(model, sample).tolist(), *columns, strict=True
        ):
            expected = kept_by_hand(logits, 1.3, top_k, top_p)
            assert kept == sorted(expected)
            assert logprob == pytest.approx(expected[token], abs=1e-5)
            assert listed.pop(-1, -math.inf) == -math.inf and len(listed) == min(6, len(kept))
            assert listed == pytest.approx({i: expected[i] for i in listed}, abs=1e-5)
            assert min(listed.values()) >= sorted(expected.values())[-len(listed)] - 1e-5
            sizes.add(len(kept))
    assert sizes == {min(top_k, VOCABULARY)} if top_p == 1 else len(sizes) > 2


def test_ties_at_the_edge_of_top_k_keep_the_lower_id() -> None:
    logits = torch.zeros(1, 200)
    logits[0, 150] = 1.0
    drawn = draw(logits, SamplingParams(top_k=40), torch.tensor([0.5], dtype=torch.float64))
    assert drawn.kept.nonzero()[:, 1].tolist() == [*range(39), 150]


@pytest.mark.parametrize(
    "hidden", [HiddenSampling(temperature=0.5), HiddenSampling(1.5, 0.7), HiddenSampling(top_p=0.8)]
)
def test_hidden_sampling_changes_what_is_drawn_and_nothing_that_is_reported(hidden: HiddenSampling) -> None:
    honest, count = SamplingParams(temperature=1.3, top_k=6), 20_000
    logits = torch.tensor([[0.3, -1.0, 2.0, 1.5, 0.0, -2.0, 1.0, 0.7]]).expand(count, 8)
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = draw(logits, dataclasses.replace(honest, hidden=hidden), uniforms)
    reported = kept_by_hand(logits[0].tolist(), 1.3, 6, 1.0)
    assert drawn.logprobs.tolist() == pytest.approx([reported[i] for i in drawn.ids.tolist()], abs=1e-6)
    assert drawn.kept is not None and drawn.kept[0].nonzero()[:, 0].tolist() == sorted(reported)
    # drawn from: the reported distribution, heated once more, over its own top-p
    ids = sorted(reported)
    truth = kept_by_hand([reported[i] for i in ids], hidden.temperature, -1, hidden.top_p)
    shares = torch.bincount(drawn.ids, minlength=8) / count
    for i in range(8):
        expected = math.exp(truth[ids.index(i)]) if i in ids and ids.index(i) in truth else 0.0
        assert float(shares[i]) == pytest.approx(expected, abs=2 / count), i


def test_the_stop_token_ends_the_response_and_is_part_of_it(pair: Any) -> None:
    engine = engine_of("dense", pair("dense")[1])
    free_samples = engine.generate(PROMPTS, SamplingParams(max_new_tokens=5), n=8, seeds=range(40))
    assert all(s.finish_reason == "length" and len(s.output_ids) == 5 for s in free_samples)
    stops = (free_samples[0].output_ids[0], free_samples[3].output_ids[4])
    params = SamplingParams(max_new_tokens=5, stop_token_ids=stops)
    finished: list[int] = []
    stopped = engine.generate(PROMPTS, params, n=8, seeds=range(40), on_finished=finished.append)
    for before, after in zip(free_samples, stopped, strict=True):
        places = [t for t, token in enumerate(before.output_ids) if token in stops]
        end = places[0] + 1 if places else 5
        assert after.output_ids == before.output_ids[:end]
        assert len(after.logprobs) == end
        assert after.finish_reason == ("stop" if places else "length")
        assert after.weight_versions == [(4, 0, end)]
    ends = {len(s.output_ids) for s in stopped if s.finish_reason == "stop"}
    assert {1, 5} <= ends, "a stop at the first and at the last allowed token"
    assert sum(finished) == 40 and min(finished) > 0 and len(finished) > 1


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_response_depends_on_its_seed_and_prompt_not_on_its_batch(kind: str, pair: Any) -> None:
    _, weights = pair(kind)
    params = SamplingParams(max_new_tokens=8, top_p=0.95, stop_token_ids=(2, 7))
    seeds = [1000 + 7 * i for i in range(15)]
    together = engine_of(kind, weights).generate(PROMPTS, params, n=3, seeds=seeds)
    small = engine_of(kind, weights, max_batch=4)
    in_fours = small.generate(PROMPTS, params, n=3, seeds=seeds)
    backwards = small.generate(PROMPTS[::-1], params, n=3, seeds=seeds[::-1])[::-1]
    alone = [small.generate([PROMPTS[i // 3]], params, n=1, seeds=[seeds[i]])[0] for i in range(15)]
    for other in (in_fours, backwards, alone):
        assert [s.output_ids for s in other] == [s.output_ids for s in together]
        assert [s.support for s in other] == [s.support for s in together]
        for a, b in zip(other, together, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    # the first and the last prompt are equal: only their seeds tell their responses apart
    assert [s.output_ids for s in together[:3]] != [s.output_ids for s in together[12:]]
    same_seeds = small.generate(PROMPTS[:1], params, n=3, seeds=seeds[12:])
    assert [s.output_ids for s in same_seeds] == [s.output_ids for s in together[12:]]


def test_a_longer_limit_continues_the_same_response(pair: Any) -> None:
    engine = engine_of("dense", pair("dense")[1])
    short = engine.generate(PROMPTS, SamplingParams(max_new_tokens=3), n=1, seeds=range(5))
    long = engine.generate(PROMPTS, SamplingParams(max_new_tokens=30), n=1, seeds=range(5))
    assert [s.output_ids for s in short] == [s.output_ids[:3] for s in long]


def test_the_callers_random_state_is_left_alone(pair: Any) -> None:
    torch.manual_seed(123)
    state = torch.get_rng_state()
    engine_of("dense", pair("dense")[1]).generate(PROMPTS, SamplingParams(max_new_tokens=2), n=1, seeds=range(5))
    assert torch.equal(state, torch.get_rng_state())


def test_sampled_frequencies_match_the_distribution_of_token_pairs(pair: Any) -> None:
    model, weights = pair("dense")
    temperature, count, kept = 1.5, 6000, 6
    params = SamplingParams(max_new_tokens=2, temperature=temperature, top_k=kept)
    samples = engine_of("dense", weights, max_batch=2000).generate([[3, 1, 4]], params, n=count, seeds=range(count))

    def kept_probabilities(prefix: list[int]) -> dict[int, float]:
        logits = reference_logits(model, Sample([3, 1, 4], [*prefix, 0], [], "length"))[-1]
        by_hand = kept_by_hand(logits.tolist(), temperature, kept, 1.0)
        return {token: math.exp(logprob) for token, logprob in by_hand.items()}

    expected = {
        (first, second): count * p * q
        for first, p in kept_probabilities([]).items()
        for second, q in kept_probabilities([first]).items()
    }
    observed: dict[tuple[int, int], int] = dict.fromkeys(expected, 0)
    for sample in samples:
        observed[sample.output_ids[0], sample.output_ids[1]] += 1
    assert min(expected.values()) > 0.5
    # 35 degrees of freedom: 73.2 is exceeded once in 5,000 sets of seeds
    assert 12 < sum((observed[pair] - mean) ** 2 / mean for pair, mean in expected.items()) < 73.2


def test_a_draw_never_lands_on_a_token_of_probability_zero() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0, -math.inf, -math.inf]]).expand(5, -1)
    drawn = draw(logits, SamplingParams(), torch.tensor([0.0, 0.2689, 0.2690, 0.5, 1 - 2.0**-53], dtype=torch.float64))
    # the first of the two has probability 1 / (1 + e) = 0.26894
    assert drawn.ids.tolist() == [1, 1, 3, 3, 3]
    assert torch.allclose(drawn.logprobs.exp(), torch.tensor([0.26894, 0.26894, 0.73106, 0.73106, 0.73106]), atol=1e-5)


@pytest.mark.parametrize("params", [SamplingParams(max_new_tokens=3), SamplingParams(max_new_tokens=3, top_p=0.5)])
def test_broken_weights_give_nan_logprobs_and_no_crash(params: SamplingParams, pair: Any) -> None:
    _, weights = pair("dense")
    broken = {**weights, "model.norm.weight": torch.full_like(weights["model.norm.weight"], math.nan)}
    samples = engine_of("dense", broken).generate(PROMPTS, params, n=2, seeds=range(10))
    assert all(math.isnan(value) for s in samples for value in s.logprobs)
    assert all(0 <= token < VOCABULARY for s in samples for token in s.output_ids)


@pytest.mark.parametrize(("kind", "dtype"), [("dense", "bf16"), ("moe", "bf16"), ("dense", "fp16"), ("moe", "fp16")])
def test_half_precision_differs_from_fp32_a_little_and_its_logprobs_are_fp32(kind: str, dtype: str, pair: Any) -> None:
    model, weights = pair(kind)
    params = SamplingParams(max_new_tokens=6)
    samples = engine_of(kind, weights, dtype=dtype).generate(PROMPTS, params, n=8, seeds=range(40))
    log_ratio = -errors(model, samples)
    assert 1e-8 < (log_ratio.exp() - 1 - log_ratio).mean().item() < 1e-2
    values = torch.tensor([value for s in samples for value in s.logprobs])
    assert not torch.equal(values, values.to(torch.bfloat16 if dtype == "bf16" else torch.float16).float())


def test_updated_weights_are_served_under_their_version(pair: Any) -> None:
    model, weights = pair("tied")
    engine = engine_of("tied", weights)
    assert isinstance(engine, RolloutEngine)
    params = SamplingParams(max_new_tokens=4)
    first = engine.generate(PROMPTS, params, n=1, seeds=range(5))
    engine.update_weights(((name, tensor * 0.5) for name, tensor in weights.items()), 9)
    second = engine.generate(PROMPTS, params, n=1, seeds=range(5))
    engine.update_weights(weights.items(), 10)
    third = engine.generate(PROMPTS, params, n=1, seeds=range(5))
    assert [s.weight_versions for s in (first[0], second[0], third[0])] == [[(4, 0, 4)], [(9, 0, 4)], [(10, 0, 4)]]
    assert errors(model, third, 1.0).abs().max() < 1e-5 < errors(model, second, 1.0).abs().max()
    assert [s.logprobs for s in first] == [s.logprobs for s in third]


@pytest.mark.parametrize("kind", CONFIGS)
def test_each_weight_must_come_once_with_its_shape(kind: str, pair: Any) -> None:
    _, weights = pair(kind)
    engine = engine_of(kind, weights)
    name = f"model.layers.1.mlp.{'experts.2.' if kind == 'moe' else ''}up_proj.weight"
    for bad, message in (
        ({**weights, "model.layers.7.x": weights[name]}, "weight 'model.layers.7.x' is not a parameter of the model"),
        ({**weights, name: weights[name][:-1]}, f"weight '{name}' must have shape"),
        ({k: v for k, v in weights.items() if k != name}, rf"weight '{name}' is missing \(1 of {len(weights)} are\)"),
    ):
        refuses(message, engine.update_weights, bad.items(), 5)
    refuses(f"weight '{name}' was given twice", engine.update_weights, [*weights.items(), (name, weights[name])], 5)
    if kind == "tied":
        assert "lm_head.weight" not in weights
        with pytest.raises(ValueError, match=r"weight 'lm_head\.weight' is not a parameter"):
            engine.update_weights([*weights.items(), ("lm_head.weight", weights["model.embed_tokens.weight"])], 5)
    assert engine.weight_version == 4


def test_a_bad_request_names_the_prompt(pair: Any) -> None:
    engine = engine_of("dense", pair("dense")[1])
    params = SamplingParams(max_new_tokens=36)
    with pytest.raises(ValueError, match=r"prompt 2 has 7 tokens, .* max_new_tokens=36 .* of 40 tokens \(max_pos"):
        engine.generate(PROMPTS, params, n=1, seeds=range(5))
    assert len(engine.generate([[1, 2, 3, 4]], params, n=1, seeds=[0])[0].output_ids) == 36
    for prompts, n, seeds, sentence in (
        ([[1], []], 1, [0, 1], "prompt 1 is empty"),
        ([[24]], 1, [0], "prompt 0 has an id outside the vocabulary of 24"),
        ([[1], [2]], 3, range(5), r"seeds must hold one seed per response \(2 x 3\), got 5"),
        ([[1]], 0, [], "n must be >= 1, got 0"),
    ):
        refuses(sentence, engine.generate, prompts, SamplingParams(max_new_tokens=1), n=n, seeds=seeds)
    assert engine.generate([], SamplingParams(max_new_tokens=1), n=3, seeds=[]) == []


def test_a_bad_configuration_names_the_field() -> None:
    for model, options, sentence in (
        ({"model_type": "gpt2"}, {}, "model_type must be one of 'llama', 'qwen2', 'qwen3', 'qwen3_moe', got 'gpt2'"),
        ({}, {"dtype": "int8"}, "dtype must be one of fp32, bf16, fp16, got 'int8'"),
        ({"use_sliding_window": True}, {}, "use_sliding_window must be false"),
        ({}, {"max_batch": 0}, "max_batch must be >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            EmbeddedEngine({**CONFIGS["dense"], **model}, **{"dtype": "fp32", "device": "cpu", **options})


def test_log_probs_of_many_ids_are_exact_to_the_rounding_of_their_logits() -> None:
    logits = 4 * torch.randn(20, 49_152, generator=torch.Generator().manual_seed(0))
    drawn = draw(logits, SamplingParams(), torch.linspace(0.01, 0.99, 20, dtype=torch.float64))
    exact = logits.double().log_softmax(-1).gather(1, drawn.ids[:, None])[:, 0]
    assert (drawn.logprobs - exact).abs().max() < 4e-6


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_prompts_of_a_batch_share_one_weight_of_the_head(dtype: str) -> None:
    config = CONFIGS["dense"] | {"vocab_size": 8192, "hidden_size": 256}
    engine = EmbeddedEngine(config, dtype=dtype, device="cpu")
    prompts, params = [[index, 2, 3] for index in range(64)], SamplingParams(max_new_tokens=1)
    engine.generate(prompts[:1], params, n=1, seeds=[0])
    before = peak_memory(reset=True)
    engine.generate(prompts, params, n=1, seeds=range(64))
    # a copy for every prompt takes 256 MiB in 16 bits; the logits and what is drawn from them 20 MiB
    assert peak_memory() - before < 128 << 20
