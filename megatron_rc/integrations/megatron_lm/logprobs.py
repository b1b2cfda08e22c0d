"""Log-probs of megatron/rl from vocabulary-sharded logits or hidden states, in fp32, at the sampling temperature."""

import inspect
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.integrations.megatron_lm.session import Answers, BinRows, Session
from megatron_rc.integrations.symbols import Function
from megatron_rc.logprobs.inputs import HeadInputs, of_chunks
from megatron_rc.logprobs.linear import linear_logprobs
from megatron_rc.logprobs.logits import vocab_parallel_logprobs
from megatron_rc.training.model.hidden_states import hidden_states


def get_logprobs(original: Function, session: Session, model: Any, *args: Any, **kwargs: Any) -> Any:
    """The host's function, with a forward pass whose logits stay sharded, or that makes none.

    The host still cuts and shifts the tokens, under packing and context parallelism too. It then calls
    selective_log_softmax with logits and ids, which reads the logits as shards for as long as this call lasts, or takes
    them for the hidden states that the model answered. Under --batch-invariant-mode the log-probs are those of the
    host's own kernels, which equal the sampler's bit for bit.
    """
    from megatron.core.utils import get_attr_wrapped_model
    from megatron.training.global_vars import get_args

    host_args, groups = get_args(), get_attr_wrapped_model(model, "pg_collection")
    group, temperature = groups.tp, host_args.rl_default_temperature
    loaded, session.loaded = session.loaded, None
    split = groups.cp is not None and dist.get_world_size(groups.cp) > 1
    rows = None if loaded is None or session.bins is None or split else session.bins.rows[loaded]
    with ExitStack() as stack:
        stack.callback(setattr, session, "answers", None)
        if getattr(host_args, "batch_invariant_mode", False):
            session.answers = Answers(temperature, group, gathered=True)
            return original(model, *args, **kwargs)
        session.answers = Answers(temperature, group)
        if session.head.linear and (head := stack.enter_context(hidden_states(model))) is not None:
            session.answers = Answers(temperature, group, weight=head.weight, rows=rows)
            if head.sequence_parallel:
                stack.callback(model.register_forward_hook(partial(_all_rows, group)).remove)
        stack.callback(model.register_forward_pre_hook(_keep_shards, with_kwargs=True).remove)
        return original(model, *args, **kwargs)


def load_packed_data_by_index(original: Function, session: Session, *args: Any, **kwargs: Any) -> Any:
    """The host's function; ours also notes the bin, because the host asks for its log-probs next."""
    call = inspect.signature(original).bind(*args, **kwargs).arguments
    mask = call["packing_context"].packed_loss_mask
    if session.bins is None or session.bins.mask is not mask:
        predicted = mask[:, 1:] != 0
        session.bins = BinRows(mask, predicted.nonzero()[:, 1].split(predicted.sum(1).tolist()))
    session.loaded = call["bin_idx"]
    return original(*args, **kwargs)


def _all_rows(group: dist.ProcessGroup, module: Any, args: Any, hidden: Tensor) -> Tensor:
    """[b, s / ranks, H] -> [b, s, H]: the host cuts whole sequences. `linear_logprobs` adds their gradients up."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    rows = hidden.transpose(0, 1)
    return gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=False, group=group).transpose(0, 1)


def _keep_shards(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    kwargs["runtime_gather_output"] = False
    if "fp32_output" in kwargs:
        # spares the fp32 copy that Float16Module would make; log-probs are fp32 from logits of any dtype
        kwargs["fp32_output"] = False
    return args, kwargs


def selective_log_softmax(original: Function, session: Session, logits: Tensor, index: Tensor) -> Tensor:
    """The host's function, which takes logits as vocabulary shards, or hidden states, inside get_logprobs."""
    answers = session.answers
    if answers is None:
        return original(logits, index)
    if answers.gathered:
        if answers.temperature == 1:
            return original(logits, index)
        # fp32 before the division, as the sampler has it; row by row, as the host computes them
        rows = zip(logits, index, strict=True)
        return torch.cat([original(row[None].float() / answers.temperature, ids[None]) for row, ids in rows])
    options: dict[str, Any] = {"tp_group": answers.tp_group, "temperature": answers.temperature}
    if answers.weight is not None:
        counted = None if answers.rows is None else answers.rows.to(logits.device)
        head = HeadInputs(rows=counted, **options, **of_chunks(session.head))
        logprobs = linear_logprobs(logits.flatten(0, 1), answers.weight, index.flatten(), head=head)
    else:
        logprobs = vocab_parallel_logprobs(logits, index, **options)
    return logprobs.view(index.shape)


def compute_logprobs_batch(original: Function, session: Session, *args: Any, **kwargs: Any) -> Any:
    """The host's function, which keeps log-probs in fp32 whatever the model's dtype."""
    call = inspect.signature(original).bind(*args, **kwargs)
    call.arguments["dtype"] = torch.float32
    session.num_rows = call.arguments["trajs_batch_size"]
    return original(*call.args, **call.kwargs)
