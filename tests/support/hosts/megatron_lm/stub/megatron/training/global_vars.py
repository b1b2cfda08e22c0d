"""The arguments of the process."""

from argparse import Namespace

args = Namespace(
    perform_rl_step=True, rl_inference_logprobs_is_correction=True, rl_importance_sampling_truncation_coef=None,
    rl_default_temperature=1.0, rl_default_top_p=0, rl_default_top_k=-1, calculate_per_token_loss=False,
    inference_dynamic_batching_logprobs_mode="raw_logprobs", cuda_graph_impl="none", curr_iteration=9,
)  # fmt: skip


def get_args() -> Namespace:
    return args
