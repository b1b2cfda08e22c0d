"""The host megatron-lm: megatron/rl and train_rl.py of the Megatron-LM repository.

`SYMBOLS` lists the functions that are replaced, and says what each replacement does. That of `prepare_data_for_update`
corrects each rollout batch once, after the host has padded and packed the sampler's log-probs and computed the old
ones. It puts the weights where the host keeps the rollout log-probs: `calculate_grpo_loss` finds them there.
"""

from megatron_rc import versions
from megatron_rc.integrations.megatron_lm import flag_rules, session
from megatron_rc.integrations.scheduler_rule import ATTACHES_RULE
from megatron_rc.integrations.symbols import Host, Symbol, replaced_by

RL = "megatron.rl.rl_utils"
PACKING = "megatron.rl.sequence_packing_utils"
TRAINING = "megatron.training.training"
OURS = "megatron_rc.integrations.megatron_lm"
_MARKS_MISSING = "marks missing rollout log-probs with NaN"


def _corrected(module: str, name: str, parameters: str, ours: str, summary: str) -> Symbol:
    """A symbol that a run with a correction replaces by the function of the same name in our module ``ours``."""
    replacement = replaced_by(f"{OURS}.{ours}", name)
    return Symbol(module, name, parameters, replacement, summary, lambda session: session.correction is not None)


SYMBOLS = (
    Symbol(TRAINING, "setup_model_and_optimizer",
        "model_type, model_provider_func=None, checkpointing_context=None, *, cfg_container=None, pg_collection=None",
        replaced_by(f"{OURS}.session", "setup_model_and_optimizer"),
        "refuses flags under which rollouts cannot be corrected, before the model is built"),
    ATTACHES_RULE,
    _corrected(TRAINING, "train_step",
        "forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func, "
        "iteration=None, pg_collection=None, p2p_communicator=None",
        "loss", "one denominator for all tokens of the step; metrics in the host's log"),
    _corrected(RL, "get_logprobs",
        "model, tokens, position_ids, no_grad=False, sequence_packing=False, packed_seq_params=None",
        "logprobs", "logits stay sharded over tensor-parallel ranks"),
    _corrected(RL, "selective_log_softmax", "logits, index",
        "logprobs", "vocabulary-parallel log-probs in fp32, at the sampling temperature"),
    _corrected(RL, "compute_logprobs_batch",
        "model, data_loader, forward_backward_func, packing_context, trajs_batch_size, seq_length, "
        "logprobs_batch_size, decoder_seq_length, dtype, pp_group, is_correction, collect_non_loss_data=False",
        "logprobs", "log-probs before the update in fp32"),
    Symbol(RL, "prepare_data_for_update",
        "model, ref_state_dict, rollouts, tokenizer, sequence_packing, is_correction, request_ledger",
        replaced_by(f"{OURS}.rollouts", "prepare_data_for_update"),
        "corrects the whole rollout batch once; steps the rule of the learning rate with what it measured"),
    _corrected(RL, "calculate_grpo_loss",
        "current_logprobs, old_logprobs, ref_logprobs, advantages, clamp_eps_lower, clamp_eps_upper, kl_beta, "
        "entropy_weight, inference_logprobs=None, is_truncation_coef=None, seq_starts=None, seq_lengths=None",
        "loss", "weights and mask of the correction on the policy-gradient term"),
    _corrected(RL, "align_unpacked_inference_logprobs",
        "inference_logprobs, old_logprobs_for_data, generation_masks, group_stats", "rollouts", _MARKS_MISSING),
    _corrected(RL, "_pad_nonnull_with_zeros", "data, max_len", "rollouts", _MARKS_MISSING),
    _corrected(PACKING, "pack_inference_logprobs",
        "inference_logprobs, packing_info, generation_masks, bin_size", "rollouts", _MARKS_MISSING),
    Symbol(PACKING, "load_packed_data_by_index", "bin_idx, packing_context, logprobs_is_correction",
        replaced_by(f"{OURS}.logprobs", "load_packed_data_by_index"),
        "names the rows of a bin that have a loss: the head computes no others",
        when=lambda session: session.head.linear),
)  # fmt: skip

HOST = Host(
    name="megatron-lm",
    summary="Megatron-LM's own RL (`train_rl.py`)",
    module=RL,
    symbols=SYMBOLS,
    versions=versions.MEGATRON_LM,
    read_version=versions.megatron_core_version,
    prepare=session.prepare,
    heads=("logits", "linear"),
    release=session.Session.release,
    tested="commit d98e8a64ddf3 of NVIDIA/Megatron-LM",
    differences=(
        "log-probs are computed and kept in fp32; the host keeps those of a bf16 model in bf16. Under "
        "--batch-invariant-mode the host's own log-softmax, which is fp32, is kept",
        "log-probs are taken at --rl-default-temperature; the host takes them at temperature 1",
        "every token of a training step has the same weight in the loss; the host averages the means of micro-batches "
        "(unless --calculate-per-token-loss)",
        "a generated token whose rollout log-prob is missing counts in no statistic, rejection or weight, and its "
        "policy-gradient term is uncorrected (dropped in a sequence that keeps nothing else); under "
        "--rl-use-sequence-packing the host reads its log-prob as 0",
        "a sequence or token with a NaN, infinite or positive log-prob is dropped; more than 1 % of them stop the run",
        "the importance weight is that of the correction, its log clamped to log_ratio_bound; the host's is unbounded "
        "without --rl-importance-sampling-truncation-coef, which the patch refuses",
    ),
    pythons=versions.PYTHON_OF_MEGATRON_LM,
    compiles_helpers=True,
    contains=("megatron-training",),
    where="Put a clone of NVIDIA/Megatron-LM on PYTHONPATH: no wheel has megatron/rl.",
    flag_rules=flag_rules.RULES,
    flag_defaults=flag_rules.DEFAULTS,
)
