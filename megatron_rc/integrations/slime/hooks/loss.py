"""The hook of --custom-loss-function-path: vocabulary-sharded logits to the corrected loss, without a softmax."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_rc.batch import Support
from megatron_rc.correction.reference.log_ratio import k3
from megatron_rc.integrations.first_batch import compare_once
from megatron_rc.integrations.log_names import PREFIX
from megatron_rc.integrations.slime.hooks.tis import Reduce, reducer
from megatron_rc.integrations.slime.settings import HOOKS, KEY, names, read
from megatron_rc.integrations.slime.signals import LENGTHS
from megatron_rc.integrations.slime.tokens import HostTokens
from megatron_rc.logprobs.logits import vocab_parallel_logprobs
from megatron_rc.loss.options import LossOptions
from megatron_rc.loss.policy_loss import policy_loss


def loss(
    args: Namespace, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Reduce
) -> tuple[Tensor, dict[str, Tensor]]:
    """The host's PPO loss with entropy and KL terms, corrected, in place of its policy_loss_function.

    loss = reduce(w L) - entropy_coef reduce'(H) + kl_loss_coef reduce'(K). L is `policy_loss` with the host's clip
    bounds, w the weights of `correct`, reduce' the host's reducer over all loss tokens, and reduce the same or
    pg_loss_reducer. Log-probs and entropy come from the local shard of the logits, with one tensor-parallel collective.

    Args:
        batch: the host's micro-batch: unconcat_tokens, total_lengths, response_lengths, loss_masks, advantages,
            rollout_log_probs, log_probs and the like, one list entry per sample.
        logits: [1, T, V_local] (miles padded: [B, T, V_local]), fp32 or bf16, before temperature.
        sum_of_sample_mean: the host's reducer, [N] -> 0-d.

    Returns:
        (loss, metrics for the host's log: name -> 0-d).
    """
    if (old := read(args).correction.old) != "current":
        # with current the host's own ratio would be another one
        changes = {KEY: {"correction": {"old": old}}, "get_mismatch_metrics": False, HOOKS["pg_loss_reducer"]: None}
        given = Namespace(**{**vars(args), **changes}), batch, logits, sum_of_sample_mean
        compare_once("policy_loss_function", lambda: _loss(*given)[0], lambda own: own(*given)[0])
    LENGTHS.record(batch["response_lengths"])
    return _loss(args, batch, logits, sum_of_sample_mean)


def _loss(
    args: Namespace, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Reduce
) -> tuple[Tensor, dict[str, Tensor]]:
    correction, tokens = read(args).correction, HostTokens(args, batch)
    old = tokens.rollout_logprobs if correction.old == "rollout" else None
    if correction.old == "recompute":
        remedy = "--compute-advantages-and-returns must be on, and --skip-actor-forward-only off"
        old = tokens.joined("log_probs", remedy)
    advantages = torch.cat([*batch["advantages"]])
    current, entropy = _logprobs(tokens, logits)
    # of the host's ratio, and of the importance ratio
    before = current.detach() if old is None else old
    train = current.detach() if correction.old == "rollout" else before
    corrected, metrics = tokens.corrected_next(train, correction, advantages)
    reduce = reducer(tokens) if names(args, "pg_loss_reducer") else sum_of_sample_mean
    dual_clip = getattr(args, "eps_clip_c", None)
    options = LossOptions(clip_lower=args.eps_clip, clip_upper=args.eps_clip_high, dual_clip=dual_clip)
    policy = policy_loss(current, old, advantages, corrected, scale=_scale(reduce, current), options=options)

    # a masked row may hold anything, and 0 times NaN is NaN
    log_ratio = torch.where(tokens.loss_mask, (current - before).detach(), 0)
    metrics["train_rollout_logprob_abs_diff"] = metrics[PREFIX + "k1"].abs()
    ratio = metrics["ois"] = log_ratio.exp()
    over, under = ratio > 1 + args.eps_clip_high, ratio < 1 - args.eps_clip
    metrics["pg_clipfrac"] = ((advantages > 0) & over | (advantages < 0) & under).float()
    metrics["ppo_kl"] = -log_ratio
    log = {name: sum_of_sample_mean(values) for name, values in metrics.items()}
    total = log["pg_loss"] = policy.loss
    if entropy is not None:
        log["entropy_loss"] = sum_of_sample_mean(entropy)
        if args.entropy_coef:
            total = total - args.entropy_coef * log["entropy_loss"]
    if args.use_kl_loss:
        reference = tokens.joined("ref_log_probs", "--ref-load must be set")
        log["kl_loss"] = sum_of_sample_mean(_kl(args, current, before, reference, tokens.loss_mask))
        total = total + args.kl_loss_coef * log["kl_loss"]
    log["loss"] = total
    return total, {name: value.detach().clone() for name, value in log.items()}


def _logprobs(tokens: HostTokens, logits: Tensor) -> tuple[Tensor, Tensor | None]:
    """[N] log-probs, 0 where loss_mask is 0, and the entropy if the host asks for it; both with gradient."""
    args, layout, flat = tokens.args, tokens.layout, logits.reshape(-1, logits.shape[-1])
    rows = layout.logits_rows(logits.device)
    targets = torch.zeros(len(flat), dtype=torch.int64, device=logits.device)
    samples = zip(tokens.batch["unconcat_tokens"], tokens.batch["response_lengths"], strict=True)
    responses = layout.local([ids[len(ids) - length :] for ids, length in samples])
    result = vocab_parallel_logprobs(
        flat,
        targets.index_copy(0, rows, responses.long()),
        tp_group=tokens.ranks.tp_group,
        temperature=args.rollout_temperature,
        # rows without a loss token cost nothing
        mask=targets.bool().index_copy(0, rows, tokens.loss_mask),
        support=_support(tokens, flat),
        with_entropy=bool(args.entropy_coef) or getattr(args, "observe_training_entropy", True),
        inplace_backward=read(args).inplace_backward,
    )
    logprobs, entropy = result if isinstance(result, tuple) else (result, None)
    return logprobs.index_select(0, rows), None if entropy is None else entropy.index_select(0, rows)


def _support(tokens: HostTokens, logits: Tensor) -> Support | None:
    """The kept ids that slime records for each response token under top-p, on the rows of the local logits."""
    top_p = tokens.args.rollout_top_p
    if top_p == 1:
        return None
    ids, offsets = (tokens.batch.get(f"rollout_top_p_token_{part}") for part in ("ids", "offsets"))
    if ids is None or offsets is None:
        raise ValueError(f"--rollout-top-p must be 1 where a batch has no kept ids (miles records none), got {top_p}")
    # ids and offsets are in host memory; the rows between responses get no ids
    kept, counts = [torch.zeros(0, dtype=torch.int64)], torch.zeros(len(logits), dtype=torch.int64)
    for sample, span, row in tokens.layout.spans:
        edges = torch.as_tensor(offsets[sample])[span.start : span.stop + 1].long().cpu()
        kept.append(torch.as_tensor(ids[sample])[int(edges[0]) : int(edges[-1])].long().cpu())
        counts[row : row + span.stop - span.start] = edges.diff()
    return Support(torch.cat(kept), torch.cat([counts.new_zeros(1), counts.cumsum(0)])).to(logits.device)


def _scale(reduce: Reduce, like: Tensor) -> Tensor:
    """[N] the factor by which a linear reducer multiplies each token: its gradient."""
    # hooks of its own: under --recompute-loss-function the reducer's saved tensors would recompute the whole loss
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
        at = torch.zeros_like(like, requires_grad=True)
        (scale,) = torch.autograd.grad(reduce(at), at)
    return scale


def _kl(args: Namespace, current: Tensor, old: Tensor, reference: Tensor, loss_mask: Tensor) -> Tensor:
    """[N] the host's estimate of KL(pi || ref) by --kl-loss-type, times current / old under --use-unbiased-kl."""
    kind, gap = args.kl_loss_type, torch.where(loss_mask, current - reference, 0)
    if kind not in ("k1", "k2", "k3", "low_var_kl"):
        raise ValueError(f"--kl-loss-type must be k1, k2, k3 or low_var_kl, got {kind!r}")
    if kind == "low_var_kl":
        # exp of more overflows in fp32: the gradient behind the clamp below would be 0 * inf
        gap = gap.clamp(-80, 80)
    kl = gap if kind == "k1" else gap.square() / 2 if kind == "k2" else k3(-gap)
    if args.use_unbiased_kl:
        kl = kl * torch.where(loss_mask, current - old, 0).exp()
    # both hosts clamp their low_var_kl at 10
    return kl.clamp(-10, 10) if kind == "low_var_kl" else kl
