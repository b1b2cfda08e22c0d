"""RC306: the logits of one contiguous range of ids are noisier than all others."""

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.rules.rule import Level, Rule, Stage, Verdict
from megatron_rc.analyze.statistics.token_ids import loudest_shard

LEAST_RATIO = 4.0
"""Least squared noise of the range over that of the other ids, in the mean and in the median. A stale or wrong shard of
the output layer had 9 to 12 on two real models, healthy dumps at most 2.2; a shard that is eight small updates old has
1 and is not seen."""
SMALLEST = 4096
"""Ids of a vocabulary, at least: in a smaller one a range is a class of tokens, with a confidence of its own."""


def check(evidence: Evidence) -> Verdict | None:
    ids = evidence.sample.tokens["token_id"]
    if ids.max(initial=0) < SMALLEST:
        return None
    shard = loudest_shard(evidence.sample, evidence.noise)
    if shard.ratio < LEAST_RATIO:
        return None
    return Verdict(
        Level.BUG,
        f"ids of part {shard.part + 1} of {shard.parts} equal parts of the vocabulary have {shard.ratio:.0f} times the "
        f"squared noise of the others, and {shard.k3:.0%} of the gap: one tensor-parallel shard of the output layer or "
        "of the embedding is wrong or was not sent",
        {"noise_ratio": shard.ratio, "part": float(shard.part), "parts": float(shard.parts)},
        share=shard.k3,
    )


RULE = Rule("RC306", Stage.LOCATION, check, needs=("token_id",), fitted=True)
