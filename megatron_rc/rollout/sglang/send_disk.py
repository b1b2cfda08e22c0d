"""Weight sync over a folder that trainer and servers share."""

import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from megatron_rc.files import replace_folder
from megatron_rc.models.files import Writer
from megatron_rc.rollout.sglang.control import on_every
from megatron_rc.rollout.sglang.http import Server
from megatron_rc.rollout.sglang.transport import Transport
from megatron_rc.settings.sglang import SGLangSettings

_PREFIX = "weights-"


class DiskSync(Transport):
    """Write a checkpoint, and have every server load it.

    A truncated file ends the server's process and a missing one is accepted silently: the checkpoint appears under
    its name only when whole, on the disk and of the right size. The folder of the version that is served stays, so
    that a server can be restarted from it; older ones are deleted.

    ``sync_dir`` is a folder of this job alone, which the servers see under the same path. A file holds
    ``bucket_bytes``, and this much host memory is used.
    """

    in_session = False

    def __init__(self, settings: SGLangSettings, hf_config: Mapping[str, Any]) -> None:
        if settings.sync_dir is None:
            raise ValueError("rollout.sglang.weight_sync=disk needs rollout.sglang.sync_dir")
        super().__init__(settings, hf_config)
        self._sync_dir = Path(settings.sync_dir).absolute()

    def send(self, servers: Sequence[Server], weights: Iterator[tuple[str, Tensor]], version: int) -> dict[str, str]:
        written = self._write(weights, version)
        body = {"model_path": str(written), "flush_cache": False}
        timeout_s = self._settings.timeout_s
        done, failures = on_every(servers, lambda s: s.post("/update_weights_from_disk", body, timeout_s))
        if done:
            for old in self._sync_dir.glob(f"{_PREFIX}*"):
                if old != written:
                    # what cannot be deleted now is tried again after the next update
                    shutil.rmtree(old, ignore_errors=True)
        return failures

    def _write(self, weights: Iterator[tuple[str, Tensor]], version: int) -> Path:
        # the random part: a resumed job writes another folder for the same version
        name = f"{_PREFIX}{version}-{uuid.uuid4().hex[:8]}"
        folder, final = self._sync_dir / f"{name}.writing", self._sync_dir / name
        try:
            writer = Writer(folder, self._settings.bucket_bytes)
            for tensor_name, tensor in weights:
                writer.add(tensor_name, tensor)
            writer.finish(self._hf_config)
            replace_folder(folder, final)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            existing = next(path for path in (self._sync_dir, *self._sync_dir.parents) if path.exists())
            free = f"{shutil.disk_usage(existing).free / 2**30:.1f} GiB free"
            problem = f"rollout.sglang.sync_dir={str(self._sync_dir)!r} cannot take the weights"
            raise ValueError(f"{problem}, {free}: {error}") from None
        return final
