def get_ppo_ray_runtime_env(config=None):
    return {"env_vars": {"NCCL_DEBUG": "WARN"}, "working_dir": None}
