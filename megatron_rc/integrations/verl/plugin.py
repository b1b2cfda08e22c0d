"""The entry point verl.plugins: importing this module patches this process of verl, if MEGATRON_RC_CONFIG is set.

verl imports it at the end of `import verl`, in every process.
"""

import os
import sys
from typing import Any

VARIABLE = "MEGATRON_RC_CONFIG"


def register() -> None:
    """Patch verl with the settings of MEGATRON_RC_CONFIG; nothing happens without it, or a second time.

    Raises SystemExit where the settings cannot be read or honoured, or this verl has other functions: a run that was
    meant to be corrected must not go on without it.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return
    try:
        patch_verl(text)
    except Exception as error:
        # verl catches every Exception of a plugin, logs it at level DEBUG and goes on
        print(f"megatron_rc: {VARIABLE} is set, but verl is not patched: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error


def patch_verl(text: str) -> Any:
    """Patch verl with settings in YAML, or in a file of it."""
    from dataclasses import replace

    from megatron_rc.integrations import verl
    from megatron_rc.integrations.patching import patch_host
    from megatron_rc.integrations.verl.settings import prepared, read
    from megatron_rc.settings.head import HeadOptions

    settings = read(text)
    host = replace(verl.HOST, prepare=lambda *_: prepared(settings))
    return patch_host(host, settings.correction, settings.lr_rule, HeadOptions(settings.head))


register()
