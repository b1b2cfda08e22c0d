"""Every way of sampling that changes what log-probs mean, as doctor finds it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from doctor_facts import RECORDED, Defect, both, flags, rollout, served, server, trainer

from megatron_rc.doctor.server.sampling import SAMPLING

DENSE = RECORDED["bad_dense"]["model_config"]
DEFECTS = [
    Defect(
        "temperature",
        lambda f: replace(f, server=server("bad_dense"), trainer=trainer(DENSE, {"temperature": 0.7})),
        error="1.00 times",
        fix="SGLANG_RETURN_ORIGINAL_LOGPROB",
    ),
    Defect(
        "temperature",
        lambda f: replace(f, server=server("bad_dense")),
        warning="does not matter",
        fix="rollout.temperature=1",
    ),
    Defect("kept-ids", rollout(top_p=0.9), error="finite top_k", fix="rollout.top_k to a number from 2 to 4096"),
    Defect("kept-ids", rollout(top_k=5000), error="more than the 4096", fix="--sampling-mask-max-tokens 5000"),
    Defect(
        "kept-ids",
        both(rollout(top_k=4), flags(speculative_algorithm="EAGLE")),
        error="EAGLE",
        fix="--speculative-algorithm",
    ),
    Defect(
        "kept-ids", both(rollout(top_k=4), served(request_fields=("input_ids",))), error="cannot return", fix="0.5.20"
    ),
    Defect(
        "sampling-defaults",
        flags(preferred_sampling_params={"repetition_penalty": 1.2}),
        error="repetition_penalty",
        fix="--preferred-sampling-params",
    ),
    Defect("penalties-and-bias", flags(watermark_default_enabled=True), error="watermarks", fix="--enable-watermark"),
    Defect("penalties-and-bias", flags(dllm_algorithm="LowConfidence"), error="diffusion", fix="--dllm-algorithm"),
    Defect(
        "penalties-and-bias",
        flags(enable_custom_logit_processor=True),
        note="bring none",
        fix="--enable-custom-logit-processor",
    ),
    Defect("input-logprobs", rollout(temperature=0.5), note="ignore temperature=0.5", fix="input_token_logprobs"),
    Defect("stop-tokens", served(generation_config={"eos_token_id": [1, 2]}), warning="(1 of 2)", fix="eos_token_id"),
    Defect(
        "speculative-decoding",
        flags(speculative_algorithm="EAGLE"),
        warning="not trained",
        fix="--speculative-algorithm",
    ),
    Defect(
        "speculative-decoding",
        flags(speculative_algorithm="EAGLE", speculative_accept_threshold_acc=0.9),
        error="do not follow their log-probs",
        fix="--speculative-accept-threshold",
    ),
    Defect("on-policy-target", flags(rl_on_policy_target="fsdp"), warning="bf16", fix="--rl-on-policy-target"),
    Defect("determinism", flags(), note="seeds are ignored", fix="--enable-deterministic-inference"),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=str)
def test_a_defect_is_found_and_its_fix_named(defect: Defect) -> None:
    defect.assert_found()


def test_every_check_finds_a_defect() -> None:
    # its files never change what /generate samples
    cannot_fail = {"generation-config"}
    assert {defect.check for defect in DEFECTS} | cannot_fail == {check.name for check in SAMPLING}
