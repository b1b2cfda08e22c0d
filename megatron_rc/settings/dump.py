"""The section ``dump`` of a job's settings."""

from dataclasses import dataclass

from megatron_rc.schema.limits import check_at_least

_SMALLEST = 1024**2
"""Bytes; less is a mistake, such as 512 for 512 MiB."""
COMPUTED_ON_DEMAND = ("kept_mass", "varentropy")
"""Settings, and the columns of these names, that read the logits of the old pass once more."""


@dataclass(frozen=True, kw_only=True)
class DumpSettings:
    """The last steps of reinforcement learning, kept in OUTPUT/dump to diagnose a run that collapsed.
    With --dump every step is kept, whole and with its token ids."""

    keep: int = 3
    """Steps to keep; 0 keeps none."""
    tokens: bool = False
    """Keep token ids, too. They are the text of prompts and responses to anyone who has the tokenizer."""
    kept_mass: bool = False
    """Compute the share of the distribution over all ids that the kept ids of top-p and top-k hold; the old pass
    reads all of its logits for it."""
    varentropy: bool = False
    """Compute the variance of -log pi of every token; the old pass reads its logits once more for it."""
    max_bytes: int = 512 * 1024**2
    """Most bytes of the kept steps together; a step that is larger alone keeps its first groups."""

    def __post_init__(self) -> None:
        check_at_least(0, keep=self.keep)
        check_at_least(_SMALLEST, max_bytes=self.max_bytes)
        if self.tokens and not self.keep:
            raise ValueError("tokens must be false when keep is 0: no step is kept")
