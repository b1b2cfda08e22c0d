"""The predicted time of a step: operations that real models count, and the whole step by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import DENSE, MOE
from torch.utils.flop_counter import FlopCounterMode

from megatron_rc import settings
from megatron_rc.cluster import step_time
from megatron_rc.cluster.layout import Options
from megatron_rc.cluster.plan import Plan, describe, make_plan
from megatron_rc.cluster.step_time import Ceilings, layer_operations, row_bytes, step_seconds
from megatron_rc.models.config import hf_config_dict
from megatron_rc.models.families import family_of
from megatron_rc.settings import ModelSettings

RECIPES = Path(__file__).parents[2] / "launch/recipes"
LENGTH = 24


def recipe(name: str, *assignments: str) -> Plan:
    return make_plan(settings.load(RECIPES / f"{name}.yaml", list(assignments)))


@pytest.mark.parametrize("fields", [DENSE, MOE], ids=["dense", "mixture"])
def test_operations_are_those_that_a_real_model_counts(fields: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    hf = hf_config_dict(ModelSettings(config=fields))
    config = family_of(hf["model_type"]).config_class()(**fields, experts_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(LENGTH)[None] % 37)
    attention = 2 * hf["num_hidden_layers"] * hf["num_attention_heads"] * hf["head_dim"] * LENGTH
    found = counter.get_total_flops() - LENGTH * step_time.head_operations(hf, hf["vocab_size"])
    # an eager attention computes the half that causality hides, too
    assert found == LENGTH * (layer_operations(hf, LENGTH) + attention)


def test_a_step_of_the_4b_recipe_by_hand() -> None:
    step = recipe("qwen3_4b_2x8").step()
    rates = Ceilings(read=3e12, copy=2e12, matmul=5e14, link=1e11)
    found = step_seconds(step, rates)
    rows, columns = 1024 * 10_240 / 4, 152_064 / 2
    weights = 36 * (2560 * 128 * (32 + 2 * 8) + 32 * 128 * 2560 + 3 * 2560 * 9728)
    layers = 2 * weights + 2 * 36 * 32 * 128 * 10_240
    assert found["layers"] == pytest.approx(4 * rows * layers / 2 / 5e14)
    assert found["head's products"] == pytest.approx(4 * rows * 2 * 2560 * columns / 5e14)
    # a fifth of the rows are of prompts
    counted = 0.8 * rows
    passes = 2 * (counted * (2 * columns + 26) + (rows - counted) * 12) / 3e12
    passes += (counted * (4 * columns + 32) + (rows - counted) * 2 * columns) / 2e12
    gathers = 2 * (256 * step_time.GATHER + 16 * rows / 1e11)
    assert found["log-probs"] == pytest.approx(passes + gathers)
    launches = (3 + 256 * 3) * step_time.LAUNCH
    assert found["correction and loss"] == pytest.approx(launches + rows * (23 + 49) / 2e12)
    # 43 of 128 sequences at once: three waves of 8,192 decoding steps, which read weights and keys and values
    decoding = 8192 * (2 * 4_022_468_096 + 43 * (2048 + 4096) * 147_456) / 3e12
    prefill = 128 * 2048 * (layers + 2 * 2560 * 151_936) / 5e14
    assert found["generation"] == pytest.approx(3 * decoding + prefill)


def test_stages_wait_for_each_other_and_experts_are_read_when_chosen() -> None:
    plan = recipe("qwen3_30b_a3b_2x8")
    step, rates = plan.step(), Ceilings.of(step_time.H200)
    one = dataclasses.replace(step, parallel=dataclasses.replace(step.parallel, pipeline=1))
    both, alone = step_seconds(step, rates), step_seconds(one, rates)
    # two stages: twice the tokens per data-parallel rank through half of the layers, and a turn of waiting
    assert both["layers"] / alone["layers"] == pytest.approx(1 + 1 / step.micro_batches)
    assert both["log-probs"] == pytest.approx(2 * alone["log-probs"])
    one_sequence = step_time._weights_in_use(plan.hf, 1)
    active, total = 3_354_000_000, 30_532_122_624
    assert one_sequence == pytest.approx(active / total, rel=0.01)
    assert step_time._weights_in_use(plan.hf, 10_000) == pytest.approx(1)


def test_a_reference_policy_and_the_current_policy_as_the_old_one_change_the_passes() -> None:
    assert recipe("qwen3_4b_2x8").step().passes == (1, 1)
    assert recipe("qwen3_4b_2x8", "loss.kl_coef=0.1").step().passes == (2, 1)
    assert recipe("qwen3_4b_2x8", "correction={old: current}").step().passes == (0, 1)


@pytest.mark.parametrize(("old", "products"), [("recompute", 4 / 4), ("current", 4 / 3), ("rollout", 4 / 3)])
def test_the_linear_head_computes_its_logits_again_without_an_old_pass(old: str, products: float) -> None:
    chosen = (f"correction={{old: {old}}}", "loss.surrogate=reinforce")
    plans = recipe("qwen3_4b_2x8", *chosen), recipe("qwen3_4b_2x8", *chosen, "train.head=linear")
    rates = Ceilings.of(step_time.H100)
    kept, linear = (step_seconds(plan.step(), rates)["head's products"] for plan in plans)
    # and leaves the rows of prompts out, a fifth of all
    assert linear / kept == pytest.approx(products * 0.8)


def test_the_linear_head_keeps_one_chunk_of_logits() -> None:
    kept, linear = recipe("qwen3_4b_2x8"), recipe("qwen3_4b_2x8", "train.head=linear")
    columns, rows = 76_032, 10_240
    found = [plan.trainer_memory()[0].logits for plan in (kept, linear)]
    # a chunk of 4,096 tokens takes less than 640 MiB
    assert found[1] == 4096 * columns * 2 + rows * (2 * 2 * 2560 + 64)
    few = recipe("qwen3_4b_2x8", "train.head=linear", "train.head_chunk=2560", "train.head_logits_dtype=fp32")
    # a chunk in fp32 and its gradient in bf16; less than that would leave the gradient of the weight
    assert few.trainer_memory()[0].logits == 2560 * columns * (4 + 2) + rows * (2 * 2 * 2560 + 64)
    assert "train.head=linear saves" in describe(few, Options(recipe=RECIPES / "qwen3_4b_2x8.yaml", hosts=["a", "b"]))
    saved = f"{(found[0] - found[1]) / 2**30:.1f} GiB of the last stage's logits"
    for plan, verb in ((kept, "would save"), (linear, "saves")):
        text = describe(plan, Options(recipe=RECIPES / "qwen3_4b_2x8.yaml", hosts=["a", "b"]))
        assert f"train.head=linear {verb} {saved}" in text


def test_masked_rows_move_only_their_gradient() -> None:
    assert row_bytes("forward", columns=100, rows=3, masked=2) == 3 * 226 + 2 * 12
    assert row_bytes("backward", columns=100, rows=3, masked=2, entropy=False) == 3 * 424 + 2 * 200


def test_a_plan_predicts_seconds_for_the_card_of_its_memory() -> None:
    for name, card in (("qwen3_4b_2x8", step_time.H100), ("qwen3_30b_a3b_2x8", step_time.H200)):
        plan = recipe(name)
        text = describe(plan, Options(recipe=RECIPES / f"{name}.yaml", hosts=["a", "b"]))
        assert f"predicted seconds of a step of longest responses, every part at the ceiling of an {card.name}" in text
        seconds = step_seconds(plan.step(), Ceilings.of(card))
        for part, value in seconds.items():
            assert f"  {part:<20}{value:10.3f}" in text
        assert f"  together            {sum(seconds.values()):10.3f}" in text
    elsewhere = dataclasses.replace(plan.step(), servers=0)
    assert "generation" not in step_seconds(elsewhere, Ceilings.of(step_time.H100))
    toy = RECIPES / "quickstart_single.yaml"
    text = describe(recipe("quickstart_single"), Options(recipe=toy, hosts=["a"]))
    assert "GiB of a trainer GPU" in text and "predicted" not in text
