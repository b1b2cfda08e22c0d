"""Every damage of an answer that doctor finds, in the words of the parser that a job uses."""

from __future__ import annotations

import base64
import math
from functools import partial
from typing import Any

import pytest
from doctor_facts import Defect, answer, both, good, refused_probe, rollout

from megatron_rc.doctor.server.answers import ANSWERS
from megatron_rc.doctor.server.facts import Facts

META = good().server.probes["plain"].meta
ENTRIES = META["output_token_logprobs"]
RENORMALISED = good().server.probes["truncated"].meta["output_token_sampling_logprobs"]


def first_logprob(value: Any) -> Any:
    return answer("plain", output_token_logprobs=[[value, *ENTRIES[0][1:]], *ENTRIES[1:]])


def shorter(facts: Facts) -> Facts:
    output_ids = facts.server.probes["plain"].body["output_ids"][:7]
    spans = [{"version": "default", "start": 0, "end": 7}]
    fields = {"completion_tokens": 7, "output_token_logprobs": ENTRIES[:7], "weight_versions": spans}
    routes = base64.b64encode(base64.b64decode(META["routed_experts"])[: 4 * 10 * 2 * 3]).decode()
    return answer("plain", output_ids, **fields, routed_experts=routes)(facts)


NEEDED = rollout(top_k=4)
"""The job samples with kept ids."""
plain, truncated = partial(answer, "plain"), partial(answer, "truncated")

DEFECTS = [
    Defect(
        "answer-accepted",
        first_logprob(None),
        error="discard the answer to a plain request: nan_logprob, a log-prob is null",
        fix="tested SGLang",
    ),
    Defect("answer-accepted", plain(prompt_tokens=5), error="prompt_tokens is 5, expected 4"),
    Defect("answer-accepted", plain(output_token_logprobs=ENTRIES[::-1]), error="other tokens"),
    Defect(
        "answer-accepted",
        plain(weight_versions=[{"version": "default", "start": 0, "end": 7}]),
        error="cover 7 of 8 tokens",
    ),
    Defect("answer-accepted", both(NEEDED, refused_probe("truncated")), error="answered 400"),
    Defect("answer-accepted", both(NEEDED, truncated(output_token_sampling_mask=None)), error="missing_support"),
    Defect(
        "answer-counts",
        plain(output_token_logprobs=ENTRIES[:-1]),
        error="7 log-probs came back for 8 tokens",
        fix="tested SGLang",
    ),
    Defect("answer-counts", plain(output_token_logprobs=[*ENTRIES, ENTRIES[0]]), error="9 log-probs"),
    Defect("answer-counts", plain(output_token_logprobs=None), error="0 log-probs"),
    Defect("answer-counts", shorter, error="8 tokens were asked for and 7 came"),
    Defect("answer-logprobs", first_logprob(None), error="null", fix="tested SGLang"),
    Defect("answer-logprobs", first_logprob(-math.inf), error="infinite"),
    Defect("answer-logprobs", first_logprob(0.1), error="above 0"),
    Defect("answer-kept-ids", truncated(output_token_sampling_mask=None), note="no kept ids", fix="rollout.top_k=-1"),
    Defect("answer-kept-ids", both(NEEDED, truncated(output_token_sampling_mask=None)), error="no kept ids"),
    Defect("answer-kept-ids", refused_probe("truncated"), note="refused"),
    Defect("answer-kept-ids", both(NEEDED, refused_probe("truncated")), error="refused"),
    Defect("answer-kept-ids", truncated(output_token_sampling_logprobs=RENORMALISED[1:]), error="7 log-probs"),
    Defect("answer-kept-ids", truncated(output_token_sampling_mask=[[36]] * 8), error="not among its kept ids"),
    Defect(
        "answer-kept-ids",
        truncated(output_token_sampling_mask=[list(range(37))] * 8),
        error="more kept ids than top_k=4",
    ),
    Defect("answer-kept-ids", truncated(output_token_sampling_logprobs=[0.5] * 8), error="above 0"),
    Defect("answer-routes", plain(routed_experts=None), error="no routes", fix="--enable-return-routed-experts"),
    Defect("answer-routes", plain(routed_experts="AAAA"), error="3 bytes, expected 66 expert ids"),
    Defect("answer-spans", plain(weight_versions=None), error="which weights", fix="max_staleness"),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=str)
def test_a_defect_is_found_and_its_fix_named(defect: Defect) -> None:
    defect.assert_found()


def test_every_check_finds_a_defect() -> None:
    assert {defect.check for defect in DEFECTS} == {check.name for check in ANSWERS}


@pytest.mark.parametrize(
    "name", [check.name for check in ANSWERS if check.name not in ("answer-accepted", "answer-kept-ids")]
)
def test_an_answer_that_is_damaged_elsewhere_leaves_a_check_undecided(name: str) -> None:
    finding = ANSWERS[name].run(answer("plain", prompt_tokens=5)(good()))
    assert (finding.status, finding.decided) == ("note", False)
    assert finding.found == "the answer is damaged: prompt_tokens is 5, expected 4"
