def get_runtime_env_for_policy_worker(policy_worker_name):
    return {"name": policy_worker_name}
