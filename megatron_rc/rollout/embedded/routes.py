"""The experts that a transformers model chooses while it decodes."""

from functools import partial
from typing import Any

import torch
from torch import Tensor


class RouteCapture:
    """Records the choices of every router of the model, by response and column of the cache."""

    def __init__(self, model: Any) -> None:
        """Watch the routers of ``model``; ValueError for a model without experts."""
        self._last: dict[int, Tensor] = {}
        self._layers = len(model.model.layers)
        self._top_k = getattr(model.config, "num_experts_per_tok", 0)
        self._table = torch.empty(0)
        routers = {i: layer.mlp.gate for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")}
        if not routers:
            raise ValueError("return_routes needs a model with experts, this one has none")
        for layer, router in routers.items():
            router.register_forward_hook(partial(self._keep_last, layer))

    def start(self, rows: int, columns: int) -> None:
        """Expect ``rows`` responses over ``columns`` of the cache; dense layers stay 0."""
        self._table = torch.zeros(rows, columns, self._layers, self._top_k, dtype=torch.int32)

    def keep(self, rows: Tensor, column: int, *, of: Tensor | None = None) -> None:
        """Record the choices of the last forward pass, from ``column`` on.

        Args:
            rows: [B] int64 responses.
            of: [B] int64, the row of the forward pass of each response; None: the same order.
        """
        for layer, experts in self._last.items():
            ids = experts.view(len(rows) if of is None else int(of.max()) + 1, -1, self._top_k)
            ids = (ids if of is None else ids[of]).to("cpu", torch.int32)
            self._table[rows.cpu(), column : column + ids.shape[1], layer] = ids
        self._last = {}

    def of(self, row: int, first: int, last: int) -> Tensor:
        """[last - first, layers, k] int32 of one response, from column ``first`` up to ``last``."""
        return self._table[row, first:last].clone()

    def _keep_last(self, layer: int, router: Any, inputs: Any, outputs: Any) -> None:
        self._last[layer] = outputs[-1]
