"""Transport: one way of bringing tensors to servers that are paused."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_rc.rollout.sglang.http import Server
from megatron_rc.settings.sglang import SGLangSettings


class Transport(ABC):
    in_session = True
    """Send tensors between begin_weight_update and end_weight_update."""
    undivided: tuple[str, ...] = ()
    """Fields of /server_info that must be 1: counts of server parts; this transport reaches only one part."""

    def __init__(self, settings: SGLangSettings, hf_config: Mapping[str, Any]) -> None:
        self._settings, self._hf_config = settings, hf_config

    def refusal(self, info: Mapping[str, Any]) -> str | None:
        """A sentence when a server with this /server_info cannot be served this way."""
        for field in self.undivided:
            # with attention alone data-parallel there is one model
            one_model = field == "dp_size" and info.get("enable_dp_attention")
            if int(info.get(field) or 1) > 1 and not one_model:
                name = self._settings.weight_sync
                return f"weight_sync={name} does not support {field}={info[field]}; use weight_sync=disk"
        return None

    @abstractmethod
    def send(self, servers: Sequence[Server], weights: Iterator[tuple[str, Tensor]], version: int) -> dict[str, str]:
        """Bring all ``weights`` to the servers; why servers failed, one sentence per url. The others have them."""

    def close(self) -> None:
        """Give back what is kept between updates."""
        return None
