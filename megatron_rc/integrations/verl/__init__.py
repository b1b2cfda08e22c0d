"""The host verl, on Megatron and FSDP: patched in each of its Ray processes by the entry point verl.plugins.

With MEGATRON_RC_CONFIG set, `plugin` patches what a process imports after verl. `SYMBOLS` are in the order of a run.
The process of the program refuses (`refusals`), and the trainer process corrects a whole rollout before its advantages
(`driver`). The workers compute the loss, the learning rate and, if asked, log-probs and entropy. docs/hosts/verl.md has
the recipe. `dump`, a hook of its own, needs none of it.
"""

from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from megatron_rc.integrations.symbols import Host, Symbol, replaced_by
from megatron_rc.integrations.verl.flag_rules import DEFAULTS, RULES
from megatron_rc.integrations.verl.settings import VerlPatch, prepare
from megatron_rc.versions import PYTHON_OF_VERL, VERL, find_module

V1, V0 = "verl.trainer.ppo.v1.trainer_base", "verl.trainer.ppo.ray_trainer"
CORRECTION, FUSED = "verl.trainer.ppo.rollout_corr_helper", "verl.models.mcore.model_forward_fused"
ENGINE = "verl.workers.engine.megatron.transformer_impl"


def _version() -> str | None:
    """The release that verl states in its own folder."""
    found = find_module("verl")
    file = Path(found.origin).parent / "version/version" if found and found.origin else None
    return file.read_text(encoding="utf-8").strip() if file and file.is_file() else None


def _without_logits(session: Any) -> bool:
    return bool(session.settings.head == "linear")


_driver, _logprobs, _policy_loss, _refusals, _worker = (
    partial(replaced_by, f"{__name__}.{file}") for file in ("driver", "logprobs", "policy_loss", "refusals", "worker")
)
SYMBOLS = (
    Symbol("verl.utils.config", "validate_config",
        "config, use_reference_policy, use_critic", _refusals("validate_config"),
        "refuses, before Ray starts, what cannot be honoured, and prints what is corrected"),
    Symbol("verl.trainer.constants_ppo", "get_ppo_ray_runtime_env", "config=None", _refusals("get_ppo_ray_runtime_env"),
        "refuses the same in every program, and hands the settings on to every Ray process of the run"),
    Symbol(CORRECTION, "compute_rollout_correction_and_add_to_batch", "batch, rollout_corr_config",
        _driver("correct_rollout"),
        "corrects the whole rollout once, on the trainer process", attrgetter("corrects")),
    Symbol(CORRECTION, "apply_bypass_mode", "batch, rollout_corr_config=None, policy_loss_config=None",
        _driver("apply_bypass_mode"),
        "refuses, before the first update, a bypass that would leave the rollout uncorrected", attrgetter("corrects")),
    Symbol("verl.trainer.ppo.core_algos", "get_policy_loss_fn", "name", _policy_loss("get_policy_loss_fn"),
        "knows loss_mode=megatron_rc", attrgetter("corrects")),
    Symbol(V1, "PPOTrainer._update_actor", "self, batch, metrics", _driver("update_actor_v1"),
        "takes rejected tokens out of the update for denominator kept; proves that the workers step the learning rate",
        attrgetter("watches_update")),
    Symbol(V0, "RayPPOTrainer._update_actor", "self, batch", _driver("update_actor_v0"),
        "the same for trainer.use_v1=False", attrgetter("watches_update")),
    Symbol("verl.workers.engine_workers", "TrainingWorker.train_mini_batch", "self, data", _worker("train_mini_batch"),
        "steps the rule of the learning rate before an update; pools the metrics of the loss after it",
        attrgetter("in_workers")),
    Symbol(ENGINE, "MegatronEngine._build_lr_scheduler", "self", _worker("build_lr_scheduler"),
        "attaches the rule of the learning rate and keeps its state in the checkpoint",
        lambda session: session.lr_rule is not None),
    Symbol(ENGINE, "MegatronEngineWithLMHead._lm_head_logits_processor",
        "self, logits, label, temperature, *, calculate_sum_pi_squared, calculate_entropy, distillation_use_topk, "
        "distillation_only, logits_processor_func, batch, data_format", _logprobs("lm_head_logits_processor"),
        "computes log-probs and entropy with one tensor-parallel collective",
        attrgetter("settings.vocab_parallel_logprobs")),
    Symbol(ENGINE, "MegatronEngine._maybe_enable_fused_kernels", "self", _logprobs("enable_fused_kernels"),
        "refuses models and settings whose log-probs would not come from the fused head", _without_logits),
    Symbol(FUSED, "fused_output_processor",
        "*, hidden_states, output_layer, output_weight, labels, context, config, **_ignored",
        _logprobs("with_our_head"),
        "computes log-probs and entropy of hidden states, a chunk of tokens at a time", _without_logits),
    Symbol(FUSED, "_fused_GPTModel_forward",
        "model, input_ids, position_ids, attention_mask, decoder_input=None, labels=None, inference_context=None, "
        "packed_seq_params=None, extra_block_kwargs=None, runtime_gather_output=None, *, inference_params=None, "
        "loss_mask=None, temperature=1.0, padding_mask=None, **kwargs", _logprobs("with_our_head"),
        "the same for a GPTModel without an output processor", _without_logits),
)  # fmt: skip

HOST = Host(
    name="verl",
    summary="verl",
    module="verl",
    symbols=SYMBOLS,
    versions=VERL,
    read_version=_version,
    prepare=prepare,
    heads=("logits", "linear"),
    release=VerlPatch.release,
    tested="0.9.1 and commit 1dda039b9c63",
    differences=(
        "rejected tokens leave only the policy-gradient term: entropy, KL, critic and denominators count all tokens",
        "a NaN, infinite or positive log-prob drops its token or sequence, and stops the run above 1 % of the tokens",
        "metrics count neither padding rows nor corrupt tokens, and bounds are bounds on pi / mu for k1, too",
    ),
    pythons=PYTHON_OF_VERL,
    in_parts=True,
    flag_rules=RULES,
    flag_defaults=DEFAULTS,
    reads_overrides=True,
    without_rl=r"\bmain_(generation|eval)\w*|\w*sft_trainer\w*",
    own_configs=tuple(
        f"{program}{strategy}trainer"
        for program in ("ppo_", "fully_async_ppo_", "one_step_off_ppo_")
        for strategy in ("", "megatron_")
    ),
    where="Install verl, or put a clone of verl-project/verl on PYTHONPATH.",
)
