"""Score centering by enumeration: the mean centred score under the sampler is 0, whatever the weight."""

import dataclasses

import pytest
import torch
from torch import Tensor

from megatron_rc import LossOptions, Rejection, RolloutCorrection, Weight, centered_logprobs, correct, policy_loss
from megatron_rc.batch import Support, TopIds
from megatron_rc.logprobs.centering import centering_metrics

V = 9
REINFORCE = LossOptions(surrogate="reinforce")
CENTERED = RolloutCorrection(centering="top", old="current")
COMPOSED = {
    "none": {},
    "truncate": {"weight": Weight(upper=1.2)},
    "clip": {"weight": Weight(mode="clip", lower=0.8, upper=1.2)},
    "mask": {"weight": Weight(mode="mask", lower=0.7, upper=1.4)},
    "gate": {"weight": Weight(upper=1.5), "reject": (Rejection("k3", "token", upper=0.05),)},
    "cis": {"weight": Weight(upper=3.3, growth="confidence", confidence_floor=5e-3)},
    "probability gate": {"reject": (Rejection("prob_diff", "token", lower=-0.05, upper=0.05),)},
}


def of(name: str) -> RolloutCorrection:
    return dataclasses.replace(CENTERED, **COMPOSED[name])


def world(seed: int, noise: float = 0.5) -> tuple[Tensor, Tensor]:
    """Logits [V] fp64 of the trainer, and log q [V] of another sampler."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(V, generator=generator, dtype=torch.float64)
    return logits, (logits + noise * torch.randn(V, generator=generator, dtype=torch.float64)).log_softmax(0)


def top_of(log_q: Tensor, k: int) -> TopIds:
    values, ids = log_q.topk(k)
    return TopIds(ids.int(), values)


def mean_gradient(
    logits: Tensor, log_q: Tensor, correction: RolloutCorrection, top: TopIds | None, options: LossOptions = REINFORCE,
    advantages: Tensor | None = None, support: Support | None = None,
) -> Tensor:  # fmt: skip
    """[V] gradient of sum_v q_v loss(v): the mean over every token that the sampler may draw."""
    leaf = logits.clone().requires_grad_()
    rows, targets = leaf.expand(V, V).clone(), torch.arange(V)
    if support is not None:
        # one row for every kept id
        targets, log_q = support.ids, log_q[support.ids]
        rows = rows[: len(targets)]
        support = Support(targets.repeat(len(targets)), torch.arange(len(targets) + 1) * len(targets))
    n = len(targets)
    counted = torch.ones(n, dtype=torch.bool)
    term = None
    if top is None:
        current = rows.log_softmax(1).gather(1, targets[:, None])[:, 0]
    else:
        repeated = TopIds(*(part.expand(n, -1).contiguous() for part in top))
        current, _, centering = centered_logprobs(rows, targets, repeated, correction, support=support)
        term = centering.term
    log_q = log_q.to(current.dtype)
    fixed = correct(current.detach(), log_q, counted, correction=correction, cu_seqlens=torch.arange(n + 1).int())
    advantages = torch.ones(n).to(current.dtype) if advantages is None else advantages
    loss = policy_loss(current, None, advantages, fixed, scale=log_q.exp(), centering=term, options=options).loss
    (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient


@pytest.mark.parametrize("options", [REINFORCE, LossOptions()], ids=["reinforce", "ppo"])
@pytest.mark.parametrize("name", COMPOSED)
def test_the_mean_centred_score_over_the_whole_vocabulary_is_zero(name: str, options: LossOptions) -> None:
    for seed in range(5):
        logits, log_q = world(seed)
        # after a first and a second update, too: q stays, and the policy moves on
        for moved in (logits, logits + 0.3 * torch.randn(V, generator=torch.Generator().manual_seed(9 + seed))):
            assert mean_gradient(moved, log_q, of(name), top_of(log_q, V), options).abs().max() < 1e-12
    plain = dataclasses.replace(of(name), centering="none")
    assert mean_gradient(logits, log_q, plain, None, options).abs().max() > 1e-3


@pytest.mark.parametrize("name", COMPOSED)
def test_it_is_zero_over_the_kept_ids_where_only_those_can_be_drawn(name: str) -> None:
    for seed, kept in ((0, 2), (1, 5), (2, 8)):
        logits, log_q = world(seed)
        ids = log_q.topk(kept).indices
        over_kept = torch.full((V,), -torch.inf).double()
        over_kept[ids] = log_q[ids].log_softmax(0)
        given = over_kept, dataclasses.replace(of(name), centering="support"), top_of(over_kept[ids], kept)
        top = TopIds(ids[given[2].ids.long()].int(), given[2].rollout_logprobs)
        found = mean_gradient(logits, *given[:2], top, support=Support(ids, torch.tensor([0, kept])))
        assert found.abs().max() < 1e-12


# weights that are one number all over a tail where q is alpha p
@pytest.mark.parametrize("name", [name for name in COMPOSED if name not in ("cis", "probability gate")])
def test_it_is_zero_with_few_ids_where_the_tail_of_q_is_that_of_p(name: str) -> None:
    for seed, k in ((0, 1), (1, 3), (2, 6)):
        logits, log_q = world(seed)
        head = log_q.topk(k).indices
        q, p = log_q.exp(), logits.softmax(0)
        tail = torch.ones(V, dtype=torch.bool).index_fill(0, head, False)
        q[tail] = q[tail].sum() * p[tail] / p[tail].sum()
        top = TopIds(head.int(), q[head].log())
        assert mean_gradient(logits, q.log(), of(name), top).abs().max() < 1e-12


def test_what_is_left_with_a_real_tail_is_a_small_part_of_the_drift() -> None:
    left, drift = [], []
    for seed in range(200):
        logits, log_q = world(seed)
        left.append(mean_gradient(logits, log_q, CENTERED, top_of(log_q, 5)).norm())
        drift.append(mean_gradient(logits, log_q, dataclasses.replace(CENTERED, centering="none"), None).norm())
    shares = torch.stack(left) / torch.stack(drift)
    assert shares.median() < 0.2 and shares.min() > 0


@pytest.mark.parametrize("name", COMPOSED)
def test_what_is_estimated_is_the_covariance_of_advantage_and_weighted_score(name: str) -> None:
    logits, log_q = world(3)
    advantages = torch.randn(V, generator=torch.Generator().manual_seed(1)).double()
    q, log_p = log_q.exp(), logits.log_softmax(0)
    plain = dataclasses.replace(of(name), centering="none")
    weight = correct(log_p, log_q, torch.ones(V).bool(), correction=plain, cu_seqlens=torch.arange(V + 1).int()).weights
    scores = torch.eye(V).double() - log_p.exp()
    centred = (q * weight * (advantages - (q * advantages).sum()))[:, None] * scores
    # E[A w s] - E[A] E[w s]
    expected = -centred.sum(0)
    found = mean_gradient(logits, log_q, of(name), top_of(log_q, V), advantages=advantages)
    assert (found - expected).abs().max() < 1e-12


@pytest.mark.parametrize("name", COMPOSED)
def test_single_precision_agrees_with_the_truth(name: str) -> None:
    logits, log_q = world(4)
    advantages = torch.randn(V, generator=torch.Generator().manual_seed(2))
    for k in (V, 4):
        top = top_of(log_q, k)
        truth = mean_gradient(logits, log_q, of(name), top, advantages=advantages.double())
        single = TopIds(top.ids, top.rollout_logprobs.float())
        found = mean_gradient(logits.float(), log_q.float(), of(name), single, advantages=advantages)
        assert (found - truth).abs().max() < 1e-6


def test_metrics_name_the_masses_the_tail_and_the_drift_that_is_removed() -> None:
    logits, log_q = world(5)
    top = top_of(log_q, 4)
    one = TopIds(*(part[None] for part in top))
    _, _, centering = centered_logprobs(logits[None], torch.zeros(1, dtype=torch.int64), one, CENTERED)
    values = centering_metrics(centering, torch.ones(1)).values()
    p, q = logits.softmax(0), log_q.exp()
    head = top.ids.long()
    alpha = (1 - q[head].sum()) / (1 - p[head].sum())
    c = torch.zeros(V).double().index_copy(0, head, (q - alpha * p)[head])
    expected = {
        "top_rollout_mass": q[head].sum(), "top_train_mass": p[head].sum(), "tail_ratio": alpha,
        "tail_ratio_clamped": 0, "drift_removed": (c - p * c.sum())[head].norm(),
    }  # fmt: skip
    assert values == pytest.approx({name: float(value) for name, value in expected.items()})
    assert float(centering.term) == pytest.approx(float((c * logits.log_softmax(0)).sum()))


PUBLISHED = {
    # vime 2b83ea209634, score_centering_correction: 8 ids of 48; no weight, truncated, clipped, masked. The
    # functions of verl c6236f515b81 and of miles 5257b2efc06c give the same sums to 3e-7 of their size
    "vime": ({}, 8, (-3137.5050764717, 1907.9039003785, 207.6897428271, 0.9586367051)),
    "vime, tis": ({"weight": Weight(upper=1.2)}, 8, (304.3416337556, 240.9046137849, 26.3322450398, 0.5777826489)),
    "vime, tis with a lower bound": (
        {"weight": Weight(mode="clip", lower=0.8, upper=1.2)}, 8,
        (-1269.3454857169, 459.6629135992, 77.3358248222, 0.7820562311),
    ),
    "vime, icepop": (
        {"weight": Weight(mode="mask", lower=0.5, upper=2.0)}, 8,
        (1589.2953304435, 846.0332603530, 72.2411192658, 1.1467944634),
    ),
    # prime-rl 851c48f98618, IPOLoss.score_centering_loss over all ids: ratios up to 2, |p - q| up to 0.05
    "prime-rl": (
        {"weight": Weight(upper=2.0), "reject": (Rejection("prob_diff", "token", lower=-0.05, upper=0.05),)}, 48,
        (-19472.0702020079, 40857.0575601908, 263.9245716656, 2.8108770744),
    ),
}  # fmt: skip
"""Composition, k, and of 10,000 rows: the sum of the term and of its square; of its gradient the sum of squares, and
the sum of the first column. Computed by the functions of these projects in fp32."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_ten_thousand_rows_agree_with_the_functions_of_other_projects(name: str) -> None:
    composed, k, expected = PUBLISHED[name]
    generator = torch.Generator().manual_seed(2609)
    logits = 2 * torch.randn(10_000, 48, generator=generator)
    log_q = (logits + 0.5 * torch.randn(10_000, 48, generator=generator)).log_softmax(1)
    leaf, targets = logits.requires_grad_(), torch.zeros(10_000, dtype=torch.int64)
    found = centered_logprobs(leaf.clone(), targets, top_of(log_q, k), dataclasses.replace(CENTERED, **composed))
    (gradient,) = torch.autograd.grad(found.centering.term.sum(), leaf)
    term, slope = found.centering.term.detach().double(), gradient.double()
    sums = (term.sum(), term.square().sum(), slope.square().sum(), slope[:, 0].sum())
    # terms of both signs cancel in the last one, whose rounding is that of its terms
    assert [value.item() for value in sums] == pytest.approx(expected, rel=1e-6, abs=5e-6)
