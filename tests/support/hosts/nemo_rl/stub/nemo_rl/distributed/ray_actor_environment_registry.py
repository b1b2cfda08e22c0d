ACTOR_ENVIRONMENT_REGISTRY = {"nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker": "uv mcore"}
