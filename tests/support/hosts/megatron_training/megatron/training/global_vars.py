"""The arguments of the process."""

from argparse import Namespace

args = Namespace(cuda_graph_impl="none", moe_enable_routing_replay=False)


def get_args() -> Namespace:
    return args
