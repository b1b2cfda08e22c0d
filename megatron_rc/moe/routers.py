"""The routers of a Megatron model by layer, and the recording and replay of one router."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor


def routers_of(chunk: torch.nn.Module) -> dict[int, TopKRouter]:
    """Layer (counted from 0) -> router of the decoder of a model chunk, ascending; {} for a chunk without experts.

    Only the decoder is searched: routers of multi-token prediction have layer numbers that coincide with those of the
    decoder, and megatron-core's list of all replay instances holds those of every model in the process.

    Raises:
        ValueError: the routes of a router cannot be recorded or replayed; the error names the setting to change.
    """
    model: Any = chunk
    while not hasattr(model, "decoder"):
        model = model.module
    routers = {}
    for layer in model.decoder.layers:
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            if router.config.moe_router_fusion:
                why = "the fused router gives no chance to record or replay routes"
                raise ValueError(f"moe_router_fusion must be False: {why}")
            if router.routing_type == "sinkhorn":
                why = "it chooses experts without a top-k"
                raise ValueError(f"moe_router_load_balancing_type must not be 'sinkhorn': {why}")
            routers[layer.layer_number - 1] = router
    return dict(sorted(routers.items()))


class Seen(NamedTuple):
    """One forward pass of one router."""

    ids: Tensor
    """[n, k]: the experts that the router chose, or would have chosen if none were replayed."""
    logprobs: Tensor | None
    """[n, k] fp32, nats: log-probs of ``ids``."""
    margins: Tensor | None
    """[n] fp32."""
    reference_logprobs: Tensor | None
    """[n, k] fp32, nats: log-probs of the experts in ``RouterTap.reference``."""


class RouterTap(RouterReplay):
    """megatron-core's RouterReplay of one router, which also records the choice of the router itself.

    It replaces ``router.router_replay`` between `attach` and `detach` and stays out of the list of all instances.
    """

    def __init__(self, router: TopKRouter, layer: int, *, detail: bool, dtype: torch.dtype) -> None:
        super().__init__()
        instances = RouterReplay.global_router_replay_instances
        instances[:] = [one for one in instances if one is not self]
        self.router, self.layer, self.detail, self.dtype = router, layer, detail, dtype
        self.reference: Tensor | None = None
        """[n, k] ids whose log-probs are recorded too."""
        self.seen: list[Seen] = []
        self._before: RouterReplay | None = None

    def attach(self) -> None:
        self._before, self.router.router_replay = self.router.router_replay, self

    def detach(self) -> None:
        self.router.router_replay = self._before
        self.clear_indices()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(gates, ids) of the experts to use, which megatron-core asks for with [n, E] scores."""
        assert default_compute_topk is not None
        action = self.router_replay_action
        if action in (RouterReplayAction.REPLAY_FORWARD, RouterReplayAction.REPLAY_BACKWARD):
            self._check_target(scores)
        result: tuple[Tensor, Tensor] = super().get_replay_topk(
            scores, topk, num_groups, group_topk, default_compute_topk
        )
        if action in (RouterReplayAction.RECORD, RouterReplayAction.REPLAY_FORWARD):
            with torch.no_grad():
                live = result[1]
                if action is RouterReplayAction.REPLAY_FORWARD:
                    live = default_compute_topk(scores.detach(), topk, num_groups, group_topk)[1]
                self.seen.append(self._look(scores.detach(), live))
        return result

    def _check_target(self, scores: Tensor) -> None:
        # gather() accepts a shorter index silently
        queue = self.replay_backward_list
        if self.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
            target = self.target_topk_idx
        elif queue:
            target = queue[0]
        else:
            raise ValueError(f"layer {self.layer}: more forward passes were recomputed than were replayed")
        if target is None or len(target) != len(scores):
            rows = 0 if target is None else len(target)
            raise ValueError(f"layer {self.layer}: {rows} rows of routes were given for {len(scores)} rows of tokens")

    def _look(self, scores: Tensor, ids: Tensor) -> Seen:
        kept = ids.to(self.dtype)
        if not self.detail:
            return Seen(kept, None, None, None)
        every = router_logprobs(scores, self.router)
        # with softmax before the top-k, scores are probabilities, whose logs have the margins of the logits
        compared = every if _is_softmax(self.router) else scores.float()
        rest = compared.scatter(1, ids, -torch.inf).amax(1)
        margins = compared.gather(1, ids).amin(1) - rest
        reference = None if self.reference is None else every.gather(1, self.reference)
        return Seen(kept, every.gather(1, ids), margins, reference)


def router_logprobs(scores: Tensor, router: Any) -> Tensor:
    """Log-probs of every expert by the router, [n, E] fp32, nats; for a sigmoid router p = sigmoid / sum of sigmoids.

    Args:
        scores: [n, E] the scores whose top-k megatron-core takes: logits, probabilities (softmax before the
            top-k), or sigmoids plus the expert bias.
        router: its configuration says which of these they are.
    """
    scores = scores.float()
    if _is_softmax(router):
        return scores.log() if router.config.moe_router_pre_softmax else scores.log_softmax(-1)
    if router.expert_bias is not None:
        scores = scores - router.expert_bias
    return (scores / scores.sum(-1, keepdim=True)).log()


def _is_softmax(router: Any) -> bool:
    return bool(router.score_function == "softmax")
