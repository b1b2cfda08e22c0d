"""centered_logprobs of logits and of hidden states, on one shard and over unequal shards, against autograd in fp64."""

import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import Collectives, run_cases
from torch import Tensor

from megatron_rc import HeadInputs, LossOptions, RolloutCorrection, Weight, correct, linear_policy_loss, policy_loss
from megatron_rc.backend import set_debug_checks
from megatron_rc.batch import Support, TopIds
from megatron_rc.logprobs.centered import CenteredLogprobs, centered_logprobs, linear_centered_logprobs
from megatron_rc.logprobs.centering import centering_metrics

TOKENS, HIDDEN, K = 12, 6, 5
WIDTHS = {1: (13,), 2: (8, 5), 4: (5, 1, 3, 4)}
TRUNCATED = RolloutCorrection(weight=Weight(upper=1.3), centering="top", old="current")
PLAIN = RolloutCorrection(centering="top", old="current")
KEPT = RolloutCorrection(weight=Weight(upper=1.3), centering="support", old="current")


@dataclass(frozen=True)
class Case:
    ranks: int = 1
    linear: bool = False
    sequence_parallel: bool = False
    with_rows: bool = False
    correction: RolloutCorrection = TRUNCATED
    temperature: float = 0.8
    vocab_size: int | None = 12


CASES = [
    *(Case(ranks, linear) for ranks in WIDTHS for linear in (False, True)),
    *(Case(2, True, sequence_parallel=True, with_rows=rows) for rows in (False, True)),
    *(Case(2, linear, correction=PLAIN, temperature=1.0, vocab_size=None) for linear in (False, True)),
    *(Case(ranks, linear, correction=KEPT) for ranks in (1, 4) for linear in (False, True)),
    Case(2, True, with_rows=True, correction=replace(KEPT, weight=None)),
]


class Problem:
    """Hidden states, a head and a sampler of its own, the same on every rank."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(7)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.hidden, self.weight = normal(TOKENS, HIDDEN).to(dtype), normal(sum(WIDTHS[1]), HIDDEN).to(dtype)
        self.targets = torch.randint(0, 12, (TOKENS,), generator=generator)
        logits = self.hidden.double() @ self.weight.double().T
        self.log_q = (logits + 0.7 * normal(*logits.shape))[:, :12].log_softmax(1)
        values, ids = self.log_q.topk(K)
        ids[3, -2:] = -1
        self.top = TopIds(ids.int(), values.float())
        # under top-k 7 some rows keep more than K ids, and one fewer
        self.kept = self.log_q >= self.log_q.topk(7).values[:, -1:]
        self.kept[4] = self.log_q[4] >= self.log_q[4].topk(3).values[-1]
        self.kept.scatter_(1, self.targets[:, None], True)
        values, ids = self.log_q.masked_fill(~self.kept, -torch.inf).log_softmax(1).topk(K)
        self.kept_top = TopIds(ids.masked_fill(values == -torch.inf, -1).int(), values.float())
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), self.kept.sum(1).cumsum(0)])
        self.support = Support(self.kept.nonzero()[:, 1], offsets)
        self.mask = torch.arange(TOKENS) % 4 != 1
        self.upstream = normal(3, TOKENS)


def truth(problem: Problem, case: Case, logits: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Log-probs, entropy and term in fp64, with the gradient of autograd; and the norm of the drift."""
    logits, top = logits[:, : case.vocab_size], problem.top
    if case.correction.centering == "support":
        logits, top = logits.masked_fill(~problem.kept, -1e30), problem.kept_top
    log_p = (logits / case.temperature).log_softmax(1)
    listed, ids = top.ids >= 0, top.ids.long().clamp(min=0)
    head, log_q = log_p.gather(1, ids).where(listed, 0), top.rollout_logprobs.double()
    p, q = head.detach().exp() * listed, log_q.exp() * listed
    rest = 1 - p.sum(1, keepdim=True)
    # where all kept ids are listed there is no tail
    has_tail, alpha = rest > 1e-9, torch.where(rest > 1e-9, (1 - q.sum(1, keepdim=True)) / rest, 1)
    c = q - alpha * has_tail * p
    if case.correction.weight is not None:
        c = q * (p / q).nan_to_num().clamp(max=1.3) - alpha * has_tail * (1 / alpha).clamp(max=1.3) * p
    mask = problem.mask
    entropy = -(log_p.exp() * log_p).sum(1)
    drift = ((c - p * c.sum(1, keepdim=True)) * listed).norm(dim=1) * mask
    return (log_p.gather(1, problem.targets[:, None])[:, 0] * mask, entropy * mask, (c * head).sum(1) * mask), drift


def solve(problem: Problem, case: Case, group: Any = None) -> tuple[Any, ...]:
    """(result, this rank's gradients, collectives, losses)."""
    rank = 0 if group is None else dist.get_rank(group)
    weight = problem.weight.split(WIDTHS[case.ranks])[rank].clone()
    options = {"tp_group": group, "temperature": case.temperature, "mask": problem.mask, "vocab_size": case.vocab_size}
    kept = case.correction.centering == "support"
    options["support"] = problem.support if kept else None
    given = problem.targets, problem.kept_top if kept else problem.top, case.correction
    with Collectives() as collectives:
        if case.linear:
            hidden = problem.hidden.chunk(case.ranks)[rank] if case.sequence_parallel else problem.hidden
            leaves = [hidden.clone().requires_grad_(), weight.requires_grad_()]
            rows = problem.mask.nonzero()[:, 0] if case.with_rows else None
            head = HeadInputs(**options, sequence_parallel=case.sequence_parallel, rows=rows, chunk=5)
            found = linear_centered_logprobs(*leaves, *given, head=head, with_entropy=True)
            of_loss = partial(losses, problem, case, found, leaves, head=head, top=given[1])
        else:
            leaves, of_loss = [(problem.hidden @ weight.T).requires_grad_()], list
            found = centered_logprobs(leaves[0], *given, with_entropy=True, **options)
    total = (torch.stack([found.logprobs, found.entropy, found.centering.term]) * problem.upstream).sum()
    gradients = torch.autograd.grad(total, leaves, retain_graph=True)
    return found, list(gradients), collectives.seen, of_loss()


def losses(problem: Problem, case: Case, found: CenteredLogprobs, leaves: list[Tensor], **head: Any) -> list[Any]:
    """(loss, gradients, metrics) of the log-probs and of linear_policy_loss, with the same leaves."""
    log_mu = problem.log_q.gather(1, problem.targets[:, None])[:, 0].float()
    pair, cu_seqlens = (found.logprobs.detach().float(), log_mu, problem.mask), torch.tensor([0, TOKENS])
    corrected = correct(*pair, correction=case.correction, cu_seqlens=cu_seqlens.int())
    scale, options = problem.mask / 7, LossOptions(surrogate="reinforce", entropy_coef=0.1)
    given = (None, problem.upstream[0].float(), corrected)
    of_terms: Any = {"entropy": found.entropy, "centering": found.centering.term}
    kept = policy_loss(found.logprobs, *given, scale=scale, options=options, **of_terms)
    kept.metrics.merge(centering_metrics(found.centering, scale).prefixed("centering/"))
    of_head: Any = {"scale": scale, "options": options, "with_entropy": True, **head}
    one_pass = linear_policy_loss(*leaves, problem.targets, *given, **of_head)
    with pytest.raises(ValueError, match="top must be given when correction.centering is"):
        linear_policy_loss(*leaves, problem.targets, *given, **of_head | {"top": None})
    with torch.no_grad():
        alone = linear_policy_loss(*leaves, problem.targets, *given, **of_head)
    answers = [[each.loss, *torch.autograd.grad(each.loss, leaves, retain_graph=True)] for each in (kept, one_pass)]
    return [*answers, [alone.loss], *(each.metrics.values() for each in (kept, one_pass, alone))]


def every_case(rank: int, cases: list[Case]) -> list[Any]:
    set_debug_checks(False)
    group, problem = (dist.group.WORLD if dist.get_world_size() > 1 else None), Problem()
    for case in cases:  # the first call exchanges the widths
        solve(problem, case, group)
    answers = [solve(problem, case, group) for case in cases]
    return [((*f[:2], *f.centering), gradients, seen, of_loss) for f, gradients, seen, of_loss in answers]


@pytest.fixture(scope="module")
def results() -> dict[Case, Any]:
    return run_cases(every_case, CASES)


@pytest.mark.parametrize("case", CASES, ids=map(str, range(len(CASES))))
def test_any_cut_equals_autograd_in_fp64(results: dict[Case, Any], case: Case) -> None:
    problem, ranks = Problem(), results[case]
    hidden, weight = problem.hidden.clone().requires_grad_(), problem.weight.clone().requires_grad_()
    logits = hidden @ weight.T
    expected, drift = truth(problem, case, logits)
    total = (torch.stack(expected) * problem.upstream).sum()
    by_logits, by_hidden, by_weight = torch.autograd.grad(total, (logits, hidden, weight))
    for (logprobs, entropy, term, *_, removed), *_ in ranks:
        # without a weight it is the root of a difference over shards, whose rounding counts where nothing is removed
        assert (removed - drift)[(drift > 1e-9) | (case.correction.weight is not None)].abs().max() < 1e-12
        assert (removed.square() - drift.square()).abs().max() < 1e-14
        for found, wanted in zip((logprobs, entropy, term), expected, strict=True):
            assert (found - wanted).abs().max() < 1e-12
    gradients = [gradients for _, gradients, *_ in ranks]
    if not case.linear:
        assert (torch.cat([own[0] for own in gradients], 1) - by_logits).abs().max() < 1e-12
        return
    found_hidden = torch.cat([own[0] for own in gradients]) if case.sequence_parallel else gradients[0][0]
    assert (found_hidden - by_hidden).abs().max() < 1e-11
    assert (torch.cat([own[1] for own in gradients]) - by_weight).abs().max() < 1e-11


def test_a_row_without_drift_has_none_but_the_rounding_of_fp32() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, gap = torch.randn(2, 200, 50, generator=generator)
    values, ids = (logits + 0.05 * gap).double().log_softmax(1).topk(8)
    top = TopIds(ids.int(), values.float())
    # no ratio reaches the bound, so that every weight is p / q, and the corrected head is p itself
    inside = RolloutCorrection(weight=Weight(upper=2.0), centering="top", old="current")
    found = centered_logprobs(logits, ids[:, 0], top, inside)
    assert found.centering.drift.max() < 1e-7


@pytest.mark.parametrize("case", [case for case in CASES if case.linear], ids=lambda _: "case")
def test_the_loss_of_one_pass_has_the_loss_gradients_and_metrics_of_the_log_probs(results: Any, case: Case) -> None:
    for *_, (kept, one_pass, alone, metrics, *others) in results[case]:
        for found, wanted in zip([*one_pass, *alone], [*kept, kept[0]], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
        assert others == [pytest.approx(metrics, rel=1e-6, abs=1e-7)] * 2
        assert "centering/drift_removed" in metrics and not alone[0].requires_grad


@pytest.mark.parametrize("case", [case for case in CASES if case.ranks > 1], ids=lambda _: "case")
def test_ranks_agree_to_the_bit_after_a_gather_and_one_for_weights(results: dict[Case, Any], case: Case) -> None:
    for values, *_ in results[case][1:]:
        for found, first in zip(values, results[case][0][0], strict=True):
            assert torch.equal(found, first)
    gathers = [bytes_of for name, bytes_of in results[case][0][2] if "gather" in name]
    if case.sequence_parallel:
        gathers = gathers[1:]
    # four and seven fp64 numbers per token, rank and chunk, together where every weight is 1
    tokens = int(Problem().mask.sum()) if case.with_rows else TOKENS
    chunks = [min(5, tokens - first) for first in range(0, tokens, 5)] if case.linear else [tokens]
    numbers_of = (11,) if case.correction.weight is None else (4, 7)
    assert gathers == [numbers * 8 * case.ranks * n for n in chunks for numbers in numbers_of]


def test_each_gradient_is_rounded_once_also_in_place() -> None:
    problem = Problem()
    logits = (problem.hidden @ problem.weight.T).bfloat16()
    up = problem.upstream.float()

    def gradient(logits: Tensor, inplace: bool = False) -> Tensor:
        leaf = logits.clone().requires_grad_()
        # logits that are not a leaf, in two pages
        pages, targets = (leaf * 1).view(3, 4, -1), problem.targets.view(3, 4)
        top = TopIds(*(part.view(3, 4, K) for part in problem.top))
        found = centered_logprobs(pages, targets, top, TRUNCATED, with_entropy=True, inplace_backward=inplace)
        total = torch.stack([found.logprobs, found.entropy, found.centering.term]).view(3, -1)
        return torch.autograd.grad((total * up).sum(), leaf)[0]

    exact = gradient(logits.float())
    assert torch.equal(gradient(logits), exact.bfloat16())
    assert torch.equal(gradient(logits, inplace=True), exact.bfloat16())


def test_a_row_that_does_not_count_has_no_term_and_no_gradient() -> None:
    problem = Problem()
    logits = (problem.hidden @ problem.weight.T).float()
    logits[0, problem.targets[0]] = -torch.inf
    problem.top.rollout_logprobs[2, 1] = torch.nan
    found = centered_logprobs(logits.requires_grad_(), problem.targets, problem.top, TRUNCATED, mask=problem.mask)
    silent = [0, 2, 1, 5, 9]
    assert found.centering.term[silent].eq(0).all() and found.centering.term[[3, 4, 6]].ne(0).all()
    (by_term,) = torch.autograd.grad(found.centering.term.sum(), logits)
    assert by_term[silent].eq(0).all() and by_term.isfinite().all() and by_term[[3, 4, 6]].ne(0).any(1).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"correction": RolloutCorrection(old="current")}, "correction.centering must be 'top' without kept ids"),
        ({"support": Problem().support}, "correction.centering must be 'support' with kept ids, got 'top'"),
        ({"top": TopIds(torch.zeros(TOKENS, K), torch.zeros(TOKENS, K))}, "top.ids must be"),
        ({"top": TopIds(torch.zeros(3, K).int(), torch.zeros(3, K))}, "top.ids must have"),
        ({"top": TopIds(torch.zeros(TOKENS, K).int(), torch.zeros(TOKENS, 2))}, "top.rollout_logprobs must have"),
    ],
)
def test_top_ids_that_do_not_fit_are_refused(change: dict[str, Any], words: str) -> None:
    problem = Problem()
    given = {"top": problem.top, "correction": TRUNCATED} | change
    with pytest.raises(ValueError, match=words):
        centered_logprobs(problem.hidden @ problem.weight.T, problem.targets, **given)


def test_nothing_of_a_call_outlives_its_results() -> None:
    problem = Problem()
    found = centered_logprobs((problem.hidden @ problem.weight.T).requires_grad_(), problem.targets, problem.top, PLAIN)
    kept = weakref.ref(found.logprobs)
    del found
    assert kept() is None, "a result that its own graph holds is freed by the garbage collector alone"
