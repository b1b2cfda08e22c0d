"""slime's loss hook: each thing that it does otherwise than slime's own loss, by hand."""

import math
from argparse import Namespace
from unittest.mock import Mock

import pytest
import torch
from hosts.slime.host import MILES, ROWS, VOCAB, Rollout, arguments, clipped, hooks, micro_batch, naming, rollout
from hosts.slime.single import in_one_process as in_one_process
from hosts.slime.single import loss_of as run
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_rc.integrations.slime.hooks import loss as slime_loss
from megatron_rc.logprobs.logits import vocab_parallel_logprobs


def test_rejected_tokens_keep_their_entropy_and_kl_terms_and_the_denominator() -> None:
    whole = rollout(21)
    nothing_left = {"reject": [{"statistic": "ratio", "level": "token", "upper": 1e-6}]}
    more = {"entropy_coef": 0.5, "use_kl_loss": True, "kl_loss_coef": 0.25, "kl_loss_type": "k2"}
    loss, log, gradient = run(whole, arguments(megatron_rc={"correction": nothing_left}, **more))
    assert log["pg_loss"] == 0
    logits = micro_batch(whole)["logits"].double().requires_grad_()
    policy = logits[0, ROWS].log_softmax(-1)
    gap = whole.current(logits) - torch.cat(whole.values["ref_log_probs"])
    expected = whole.sum_of_sample_mean()(-0.5 * -(policy.exp() * policy).sum(-1) + 0.25 * gap.square() / 2)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(gradient.double(), torch.autograd.grad(expected, logits)[0], rtol=1e-5, atol=1e-7)


@pytest.mark.host("slime", "miles", proof="stand-in", feature="corrupt log-probs leave the gradient finite")
@pytest.mark.parametrize("host", ["slime", "miles"])
def test_a_corrupt_rollout_logprob_leaves_the_gradient_finite(host: str) -> None:
    whole = rollout(22)
    padded = {**MILES, "qkv_format": "bshd"} if host == "miles" else {}
    batch = micro_batch(whole, padded=13 if padded else None)
    sampled = [one.clone() for one in micro_batch(whole)["rollout_log_probs"]]
    sampled[0][1] = math.nan
    batch["rollout_log_probs"] = sampled
    # so that no clip cuts a gradient off
    _, log, gradient = run(whole, arguments(megatron_rc={"correction": {"old": "current"}}, **padded), **batch)
    assert gradient.isfinite().all() and all(math.isfinite(value) for value in log.values())
    assert not gradient[0, 3].any() and gradient[0, 2].any()
    assert log["rc/nonfinite_share"] == pytest.approx(1 / 4)  # of the four loss tokens of that response
    # with a unit larger than a token, the whole response leaves
    sequences = arguments(megatron_rc={"correction": {"preset": "seq-tis", "old": "current"}}, **padded)
    _, _, gradient = run(whole, sequences, **batch)
    second = gradient[1, 0] if padded else gradient[0, 8]
    assert not gradient[0, :8].any() and second.any()


def test_what_lies_under_the_mask_is_never_read() -> None:
    whole = rollout(33)
    args = arguments(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k2", use_unbiased_kl=True)
    expected, log, gradient = run(whole, args)
    batch = micro_batch(whole)
    hidden = {
        name: [one.masked_fill(mask == 0, math.nan) for one, mask in zip(batch[name], whole.loss_masks, strict=True)]
        for name in ("log_probs", "rollout_log_probs", "ref_log_probs")
    }
    assert sum(one.isnan().sum() for one in hidden["log_probs"]) == 2
    found, log_again, gradient_again = run(whole, args, **hidden)
    assert found == expected and log_again == log and torch.equal(gradient_again, gradient)


FAR = [("low_var_kl", log_prob, 10.0) for log_prob in (-101.0, -math.inf, -6.0)]


@pytest.mark.parametrize(
    ("kind", "log_prob", "expected"), [*FAR, ("low_var_kl", -3.0, 4.389056), ("k3", -6.0, math.exp(5) - 6)]
)
def test_low_variance_kl_alone_ends_at_ten_and_has_no_nan_gradient(kind: str, log_prob: float, expected: float) -> None:
    current = torch.tensor([log_prob], requires_grad=True)
    args = Namespace(kl_loss_type=kind, use_unbiased_kl=False)
    kl = slime_loss._kl(args, current, current.detach(), torch.tensor([-1.0]), torch.ones(1, dtype=torch.bool))
    assert kl.item() == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(kl.sum(), current)
    assert gradient.item() == pytest.approx(0.0 if expected == 10 else 1 - math.exp(-1 - log_prob))


def kept(whole: Rollout, count: int) -> dict[str, list[Tensor]]:
    """The ids that slime records under top-p: for every response token itself and the next ones, on the host."""
    ids, offsets = [], []
    for tokens, prompt in zip(whole.tokens, whole.prompts, strict=True):
        rows = [[(int(t) + k) % VOCAB for k in range(count)] for t in tokens[prompt:]]
        ids.append(torch.tensor([i for row in rows for i in row], dtype=torch.int32))
        offsets.append(torch.arange(0, count * len(rows) + 1, count, dtype=torch.int32))
    return {"rollout_top_p_token_ids": ids, "rollout_top_p_token_offsets": offsets}


def test_under_top_p_policy_and_entropy_live_on_the_kept_ids() -> None:
    whole = rollout(25)
    rows = torch.stack([(whole.targets + k) % VOCAB for k in range(3)], dim=1)
    policy = micro_batch(whole)["logits"][0][ROWS].double().gather(1, rows).log_softmax(-1)
    old = list(policy[:, 0].float().split(whole.responses))
    _, log, _ = run(whole, arguments(rollout_top_p=0.9), log_probs=old, rollout_log_probs=old, **kept(whole, 3))
    assert log["ppo_kl"] == pytest.approx(0, abs=1e-6)
    expected = whole.sum_of_sample_mean()(-(policy.exp() * policy).sum(-1))
    assert log["entropy_loss"] == pytest.approx(expected.item(), rel=1e-5)
    with pytest.raises(ValueError, match="^--rollout-top-p must be 1 where a batch has no kept ids"):
        run(whole, arguments(rollout_top_p=0.9))


@pytest.mark.host("slime", proof="stand-in", feature="two policies (`old: rollout`)")
def test_a_gate_on_current_over_mu_drops_responses_of_negative_advantage_only() -> None:
    whole = rollout(26)
    batch = micro_batch(whole)
    # every response looks e times less likely to pi than to mu
    sampled = list((whole.current(batch["logits"]) + 1).split(whole.responses))
    advantages = [torch.full((n,), sign) for n, sign in zip(whole.responses, (1.0, -1.0, -1.0, 1.0), strict=True)]
    args = arguments(use_rollout_logprobs=True, megatron_rc={"correction": "off-policy-sequence-mask"})
    _, log, gradient = run(whole, args, rollout_log_probs=sampled, advantages=advantages)
    assert gradient[0, 2:7].any() and gradient[0, 22:30].any()
    assert not gradient[0, 8].any() and not gradient[0, 18:20].any()
    assert log["rc/masked_token"] == pytest.approx(2)  # one per response, of two


def test_the_policy_gradient_term_alone_goes_through_pg_loss_reducer() -> None:
    whole = rollout(27)
    path = naming("pg_loss_reducer")
    summed, log, _ = run(whole, arguments(megatron_rc={"aggregation": "seq-mean-token-sum"}, entropy_coef=0.1, **path))
    plain, own, _ = run(whole, arguments(entropy_coef=0.1))
    per_token = micro_batch(whole)
    reduced = whole.sum_of_sample_mean(per_token=True)
    ratio = (whole.current(per_token["logits"]) - torch.cat(per_token["log_probs"])).exp()
    expected = reduced(clipped(ratio, torch.cat(per_token["advantages"]))).item()
    assert log["pg_loss"] == pytest.approx(expected, rel=1e-5) != own["pg_loss"]
    assert log["entropy_loss"] == own["entropy_loss"]
    assert summed - log["pg_loss"] == pytest.approx(plain - own["pg_loss"], rel=1e-4)


def test_the_gradient_can_be_written_into_the_logits() -> None:
    whole = rollout(28)
    _, _, expected = run(whole, arguments(entropy_coef=0.1))
    batch = micro_batch(whole)
    leaf = batch["logits"].clone().requires_grad_()
    logits = leaf * 1
    args = arguments(entropy_coef=0.1, megatron_rc={"inplace_backward": True})
    loss, _ = hooks.loss(args, batch, logits, whole.sum_of_sample_mean())
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], expected)
    torch.testing.assert_close(logits.detach(), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_loss_may_be_recomputed_in_backward_once(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Mock(wraps=vocab_parallel_logprobs)
    monkeypatch.setattr(slime_loss, "vocab_parallel_logprobs", forward)
    whole = rollout(31)
    args = arguments(entropy_coef=0.1, megatron_rc={"correction": "seq-tis"})
    expected, _, gradient = run(whole, args)
    batch = micro_batch(whole)
    leaf = batch["logits"].clone().requires_grad_()
    forward.reset_mock()
    # as --recompute-loss-function does in slime (False) and in miles (True)
    loss, _ = checkpoint(hooks.loss, args, batch, leaf, whole.sum_of_sample_mean(), use_reentrant=reentrant)
    loss.backward()
    assert loss.item() == expected and leaf.grad is not None and forward.call_count == 2
    torch.testing.assert_close(leaf.grad, gradient)


def test_miles_may_leave_the_entropy_out() -> None:
    whole = rollout(30)
    _, log, _ = run(whole, arguments(observe_training_entropy=False))
    assert "entropy_loss" not in log
    _, log, _ = run(whole, arguments(observe_training_entropy=False, entropy_coef=0.1))
    assert log["entropy_loss"] > 0
