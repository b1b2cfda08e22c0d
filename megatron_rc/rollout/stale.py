"""StaleEngine: an engine whose weights lag a number of updates behind the trainer."""

from collections import deque
from collections.abc import Iterable

from torch import Tensor

from megatron_rc.engine import RolloutEngine


class StaleEngine:
    """RolloutEngine that wraps another one, which serves the weights of ``lag`` updates ago.

    Before that many updates it serves the first weights. ``weight_version`` and the samples name the version that is
    really served. ``lag`` + 1 copies of the weights are kept in host memory.
    """

    def __init__(self, engine: RolloutEngine, lag: int) -> None:
        if lag < 0:
            raise ValueError(f"lag must be >= 0, got {lag!r}")
        self._engine, self.generate = engine, engine.generate
        self._queue: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=lag + 1)
        self.weight_version = engine.weight_version

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Queue ``version``, or replace it if it is the newest, and serve the version ``lag`` updates old."""
        if self._queue and self._queue[-1][0] == version:
            self._queue.pop()
        self._queue.append((version, {name: _host_copy(tensor) for name, tensor in weights}))
        if len(self._queue) == 1 or self._queue[0][0] != self.weight_version:
            self._serve_oldest()

    def serve_now(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Serve these weights until the next update, which returns to the queue."""
        self._engine.update_weights(weights, version)
        self.weight_version = version

    def state_tensors(self) -> dict[str, Tensor]:
        """The queued weights under "queue/<version>/<name>", next to the state of the wrapped engine."""
        state = {f"engine/{key}": tensor for key, tensor in self._engine.state_tensors().items()}
        for version, held in self._queue:
            state |= {f"queue/{version}/{name}": tensor for name, tensor in held.items()}
        return state

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore the queue that ``state_tensors`` returned, and serve what was served then."""
        inner: dict[str, Tensor] = {}
        held: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            owner, _, rest = key.partition("/")
            if owner == "engine":
                inner[rest] = tensor
            else:
                version, _, name = rest.partition("/")
                held.setdefault(int(version), {})[name] = _host_copy(tensor)
        self._engine.load_state_tensors(inner)
        self._queue.clear()
        self._queue.extend((version, held[version]) for version in sorted(held))
        if self._queue:
            self._serve_oldest()

    def check(self) -> None:
        self._engine.check()

    def close(self) -> None:
        self._queue.clear()
        self._engine.close()

    def _serve_oldest(self) -> None:
        version, weights = self._queue[0]
        self._engine.update_weights(weights.items(), version)
        self.weight_version = self._engine.weight_version


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
