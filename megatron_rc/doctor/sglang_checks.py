"""The registry of all checks of an SGLang server, in the order in which they are shown."""

from __future__ import annotations

from megatron_rc.doctor.facts import Facts
from megatron_rc.doctor.registry import Registry
from megatron_rc.doctor.sglang_answers import ANSWERS
from megatron_rc.doctor.sglang_model import MODEL
from megatron_rc.doctor.sglang_sampling import SAMPLING
from megatron_rc.doctor.sglang_serving import SERVING

SGLANG: Registry[Facts] = Registry.joined("SGLang server", SERVING, MODEL, SAMPLING, ANSWERS)
