"""Whether the installed slime or miles hands current log-probs and advantages to the hook of its TIS function."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rc.integrations.slime.family import FAMILY
from megatron_rc.integrations.slime.settings import judges_advantages, read
from megatron_rc.versions import find_module

_NAMES = {"current_log_probs", "advantages"}
_GIVEN = re.compile(r"""\b(\w+)(?:=(?!=)|["']\s*:|["']\]\s*=(?!=))""")


def judges_current(args: Any) -> bool:
    """Whether tis can judge current / mu, which is the ratio of the host's own loss."""
    return read(args).correction.old == "rollout" and bool(args.use_rollout_logprobs) and hands_over_both()


def lacks_advantages(args: Any) -> bool:
    """Whether tis is to judge advantages that it does not see."""
    return judges_advantages(read(args).correction) and not hands_over_both()


@cache
def hands_over_both() -> bool:
    """Whether the source of every host that is found gives both names; False without a host or its source.

    Read once: hooks ask for every micro-batch.
    """
    specs = [spec for spec in [find_module(member.tis_caller) for member in FAMILY] if spec is not None]
    files = [Path(spec.origin) for spec in specs if spec.origin is not None and spec.origin.endswith(".py")]
    found = [set(_GIVEN.findall(file.read_text(encoding="utf-8"))) for file in files]
    return bool(specs) and len(found) == len(specs) and all(names >= _NAMES for names in found)
