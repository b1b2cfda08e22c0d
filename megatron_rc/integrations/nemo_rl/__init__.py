"""The host nemo-rl: GRPO of NVIDIA-NeMo/RL, corrected on the process that runs the script.

`driver` has the policy built with our `train`, through the host's own parameter policy_factory: before every update it
corrects the whole rollout, which this process holds, by its advantages, which the host shards over its workers. With a
rule of the learning rate, `worker` has it on Megatron's scheduler; without one, no worker needs this package.
docs/hosts/nemo_rl.md has the recipe.
"""

from functools import partial
from importlib import import_module

from megatron_rc.integrations.nemo_rl.flag_rules import DEFAULTS, RULES
from megatron_rc.integrations.symbols import Host, Symbol, replaced_by
from megatron_rc.versions import NEMO_RL, PYTHON_OF_NEMO_RL, stated_version

OURS = __name__
GRPO = "nemo_rl.algorithms.grpo"
POLICY = "nemo_rl.models.policy.lm_policy"
WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker"
_SETUP = "master_config, tokenizer, dataset, val_dataset, processor=None"

SYMBOLS = (
    Symbol(GRPO, "setup", f"{_SETUP}, policy_factory=None", replaced_by(f"{OURS}.driver", "setup"),
        "refuses what cannot be honoured, and builds the policy whose `train` corrects every rollout"),
    Symbol("nemo_rl.algorithms.ppo", "setup", _SETUP, replaced_by(f"{OURS}.session", "refuse_trainer"),
        "refuses run_ppo.py, whose rollouts are not corrected"),
    Symbol("nemo_rl.algorithms.single_controller_utils.setup", "setup_single_controller",
        "master_config, tokenizer, *, processor=None, partition_id='rollout_data'",
        replaced_by(f"{OURS}.session", "refuse_trainer"),
        "refuses run_grpo_single_controller.py, whose rollouts are never whole on one process"),
    Symbol(POLICY, "Policy.__init__",
        "self, cluster, config, tokenizer, name_prefix='lm_policy', workers_per_node=None, init_optimizer=True, "
        "weights_path=None, optimizer_path=None, init_reference_model=True, processor=None, "
        "worker_extension_cls_fqn=None, skip_weight_load=False",
        None, "the policy that ours extends"),
    Symbol(POLICY, "Policy.train",
        "self, data, loss_fn, eval_mode=False, gbs=None, mbs=None, timer=None, check_dim_skip_keys=None",
        None, "called with weighted advantages"),
    Symbol(POLICY, "Policy.run_all_workers_single_data", "self, method_name, *args, **kwargs",
        None, "tells the workers what the rule of the learning rate reads"),
    Symbol(WORKER, "MegatronPolicyWorkerImpl.__init__",
        "self, config, tokenizer, weights_path=None, optimizer_path=None, init_optimizer=True, "
        "init_reference_model=True, *, worker_sharding_annotations, skip_weight_load=False, **kwargs",
        None, "the worker that ours extends with the rule of the learning rate"),
)  # fmt: skip

HOST = Host(
    name="nemo-rl",
    summary="NeMo-RL (`run_grpo.py`)",
    module=GRPO,
    symbols=SYMBOLS,
    versions=NEMO_RL,
    read_version=partial(stated_version, "nemo_rl.package_info"),
    prepare=lambda correction, lr_rule: import_module(f"{OURS}.session").prepare(correction, lr_rule),
    release=lambda session: session.release(),
    tested="commit 7ea279abfbeb (0.6.0)",
    differences=(
        "rejected tokens leave only the policy-gradient term: KL and NLL terms and denominators count them",
        "a NaN, infinite or positive log-prob drops its token or sequence, and stops the run above 1 % of the tokens",
        "where the host demands use_importance_sampling_correction (asynchronous GRPO, FP8 rollouts), its own weight "
        "is taken off the loss",
    ),
    pythons=PYTHON_OF_NEMO_RL,
    in_parts=True,
    flag_rules=RULES,
    without_rl=r"\brun_(\w+_)?(sft|dpo|rm|distillation\w*|eval)\.py",
    flag_defaults=DEFAULTS,
    reads_overrides=True,
    where="Put a clone of NVIDIA-NeMo/RL on PYTHONPATH, or run in its container.",
)
