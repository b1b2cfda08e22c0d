"""The process that runs the script of NeMo-RL: a rollout is corrected as a whole, before its update."""

import copy
import inspect
import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rc import schema
from megatron_rc.correction.correct import correct
from megatron_rc.integrations.flag_rules import value_at
from megatron_rc.integrations.log_names import checked, measured, prefixed, worth_logging
from megatron_rc.integrations.nemo_rl.session import HOSTS_WORKER, KEY, WORKER, Session, WorkerSettings, refuse
from megatron_rc.integrations.scheduler_rule import settings_of
from megatron_rc.integrations.symbols import Function
from megatron_rc.learning_rate.rule import mismatch_signals
from megatron_rc.learning_rate.scale import Signals

_logger = logging.getLogger(__name__)
COMPARED = 8
"""Responses of the first batch on which the host's loss is tried."""
LOGPROBS = ("prev_logprobs", "generation_logprobs")


def setup(original: Function, session: Session, *args: Any, **kwargs: Any) -> Any:
    """The host's function, whose policy corrects its rollouts; ValueError for what cannot be honoured."""
    call = inspect.signature(original).bind(*args, **kwargs)
    master_config = call.arguments["master_config"]
    refuse(session, master_config)
    if call.arguments.get("policy_factory") is not None:
        raise ValueError("policy_factory must be None in a patched run, which passes its own")
    session.used = True
    weighted = session.correction is not None and value_at(master_config, "loss_fn.use_importance_sampling_correction")
    own = "; the host's own importance weight is taken off the loss" * bool(weighted)
    rule = "" if session.lr_rule is None else f", {session.lr_rule}"
    print(f"megatron_rc is on in this run of NeMo-RL: {session.correction}{rule}{own}", flush=True)
    call.arguments["policy_factory"] = partial(make_policy, session)
    return original(*call.args, **call.kwargs)


def make_policy(session: Session, **kwargs: Any) -> Any:
    """The host's Policy with our `train`; with a rule of the learning rate also with our workers."""
    from nemo_rl.models.policy.lm_policy import Policy

    if session.lr_rule is not None:
        from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY

        # the Python of the worker that ours extends
        ACTOR_ENVIRONMENT_REGISTRY[WORKER] = ACTOR_ENVIRONMENT_REGISTRY[HOSTS_WORKER]
        # plain values, which Ray hands to workers
        rule = settings_of(session.lr_rule, "to other processes")
        kwargs["config"][KEY] = schema.to_dict(WorkerSettings(lr_rule=rule))
        kwargs["worker_extension_cls_fqn"] = WORKER

    class CorrectedPolicy(Policy):
        megatron_rc = session

        def train(self, data: Any, loss_fn: Any, eval_mode: bool = False, **kwargs: Any) -> Any:
            if eval_mode:
                return super().train(data, loss_fn, eval_mode=True, **kwargs)
            return corrected_train(super().train, self.megatron_rc, self, data, loss_fn, **kwargs)

    return CorrectedPolicy(**kwargs)


def corrected_train(original: Function, session: Session, policy: Any, data: Any, loss_fn: Any, **kwargs: Any) -> Any:
    """Policy.train on a corrected rollout, with metrics of the correction and of the learning rate.

    A policy-gradient loss is proportional to its advantage: w L(A) = L(w A) for w >= 0, also for PPO with its clips and
    dual clip, REINFORCE, GSPO and CISPO. So the weights go into the advantages, and every loss of the host is
    corrected; KL and NLL terms and denominators stay. The data are given back as they were.

    Args:
        data: prev_logprobs, generation_logprobs, advantages, token_mask, each [B, S], and sample_mask [B]; column t is
            token t, and column 0 is never trained on.
        loss_fn: the host's ClippedPGLossFn.

    Raises:
        ValueError: the data lack what is needed, too many log-probs are corrupt, or k3 is above max_k3.
    """
    lengths = (data["token_mask"][:, 1:] != 0).sum(-1)
    answered = lengths[lengths > 0]
    signals = Signals(length=answered.double().mean().item() if len(answered) else None)
    log: dict[str, float] = {}
    own = {name: data[name] for name in (*LOGPROBS, "advantages") if name in data}
    try:
        if session.correction is not None:
            values = _correct(session, data)
            log |= prefixed(worth_logging(values))
            signals = mismatch_signals(values, session.correction)._replace(length=signals.length)
            if loss_fn.use_importance_sampling_correction:
                loss_fn = copy.copy(loss_fn)
                loss_fn.use_importance_sampling_correction = False
            if not session.compared:
                session.compared = True
                _compare(loss_fn, data)
        if session.lr_rule is not None:
            log |= policy.run_all_workers_single_data("begin_rollout", signals._asdict())[0]
        results: dict[str, Any] = original(data, loss_fn, **kwargs)
    finally:
        # the host logs them
        data.update(own)
    # the host sums each list
    results["all_mb_metrics"].update({name: [value] for name, value in log.items()})
    return results


def _correct(session: Session, data: Any) -> dict[str, float]:
    """Put the weights of a rollout into its advantages; answers with the metrics that exist."""
    correction = session.correction
    assert correction is not None
    missing = [name for name in (*LOGPROBS, "advantages", "sample_mask") if name not in data]
    if missing:
        raise ValueError(f"the data of Policy.train must have {', '.join(missing)} for a correction")
    mask = (data["token_mask"] != 0) & (data["sample_mask"] != 0)[:, None]
    mask[:, 0] = False
    train, rollout = (data[name].float() for name in LOGPROBS)
    advantages: Tensor = data["advantages"]
    corrected = correct(train, rollout, mask, correction=correction, advantages=advantages.float())
    values = checked(corrected.metrics, correction, session.lost_batch)
    data["advantages"] = torch.where(mask, advantages * corrected.weights.to(advantages.dtype), advantages)
    corrupt = mask & ~(train.isfinite() & rollout.isfinite())
    if corrupt.any():
        # 0 times NaN is NaN, in the loss and in each of the host's metrics
        both = torch.where(train.isfinite(), train, torch.where(rollout.isfinite(), rollout, 0))
        for name in LOGPROBS:
            data[name] = torch.where(corrupt, both.to(data[name].dtype), data[name])
    return measured(values)


def _compare(loss_fn: Any, data: Any) -> None:
    """Refuse a loss of the host that is not proportional to its advantages, on the first responses of the run.

    L(2 A) - L(0) = 2 (L(A) - L(0)) in fp64, with A = |advantage|, so that nothing cancels, and ratios away from 1.
    """
    few = {name: values[:COMPARED].double() for name, values in data.items() if isinstance(values, Tensor)}
    tokens = few["token_mask"][:, 1:] * few["sample_mask"][:, None]
    current = few["prev_logprobs"][:, 1:] + 0.05
    try:
        size, counts = few["advantages"].abs(), (few["sample_mask"].sum(), tokens.sum())
        none, ones, twos = (loss_fn(current, {**few, "advantages": f * size}, *counts)[0] for f in (0, 1, 2))
    except (TypeError, KeyError, AttributeError) as error:
        _logger.warning("nemo-rl: its loss could not be compared on a first batch (%s): %s", type(loss_fn), error)
        return
    if not torch.allclose(twos - none, 2 * (ones - none), rtol=1e-6, equal_nan=True):
        raise ValueError(
            f"the loss of this NeMo-RL, {type(loss_fn).__name__}, is not proportional to its advantages, which take "
            f"the weights: {none:.6g} for none, {ones:.6g} for them and {twos:.6g} for twice them; nothing was updated"
        )
