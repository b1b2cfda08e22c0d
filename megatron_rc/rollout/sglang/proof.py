"""Proofs that a server holds the weights sent: names, checksums and the log-probs of a probe prompt.

The version that a server reads back proves nothing: a server accepts tensors with unknown names, and checkpoints
without half of the tensors.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

Checksums = list[dict[str, str]]
"""Checksums per rank of a server, each by the server's name of the tensor."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FUSED = (
    (re.compile(r"\.[qkv]_proj\."), ".qkv_proj."),
    (re.compile(r"\.experts\.\d+\.(gate|up)_proj\.weight$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.down_proj\.weight$"), ".experts.w2_weight"),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
)


class Delivery:
    """Names, shapes and sums of the weights of one update, which must hold the tensors of the one before."""

    def __init__(self, before: "Delivery | None") -> None:
        """``before``: the last update that servers accepted."""
        self.shapes: dict[str, torch.Size] = {}
        self._sums: list[Tensor] = []
        self._expected = before.shapes if before else {}
        self._sums_before = before.sums() if before else {}

    def see(self, name: str, tensor: Tensor) -> None:
        """Record a tensor; raise ValueError for a wrong one: a wrong shape ends the process of a server."""
        if name in self.shapes:
            raise ValueError(f"the update holds {name} twice")
        if self._expected and name not in self._expected:
            raise ValueError(f"the update holds {name}, which the first one did not")
        if self._expected and tensor.shape != self._expected[name]:
            shapes = f"{list(tensor.shape)}, the first one {list(self._expected[name])}"
            raise ValueError(f"the update holds {name} of shape {shapes}")
        self.shapes[name] = tensor.shape
        # equal sums do not prove equal values, because changes may cancel
        self._sums.append(tensor.view(_INTEGERS[tensor.itemsize]).sum(dtype=torch.int64))

    def sums(self) -> dict[str, int]:
        return dict(zip(self.shapes, torch.stack(self._sums).tolist(), strict=True))

    def changed(self) -> set[str]:
        """Names of tensors that certainly differ from those of the update before; others may differ, too.

        Raises:
            ValueError: the update is empty, or lacks tensors of the one before.
        """
        missing = [name for name in self._expected if name not in self.shapes]
        if missing:
            lacks = f"{len(missing)} of the {len(self._expected)} tensors of the first one"
            raise ValueError(f"the update lacks {lacks}, such as {missing[0]}")
        if not self.shapes:
            raise ValueError("the update holds no tensor")
        return {name for name, value in self.sums().items() if self._sums_before.get(name, value) != value}


def server_name(name: str) -> str:
    """The server's name for a checkpoint's tensor, or for what it is fused into: q/k/v, gate/up, experts."""
    for pattern, fused in _FUSED:
        if pattern.search(name):
            return pattern.sub(fused, name)
    return name


def not_sent(names: Iterable[str], held: Checksums) -> str | None:
    """A sentence if a server holds a tensor that was not sent, not even in part, else None."""
    filled = {server_name(name) for name in names}
    if "model.embed_tokens.weight" in filled:
        # with tied word embeddings some servers also list the head
        filled.add("lm_head.weight")
    # a draft model has weights of its own, apart from the policy's
    own = {name for rank in held for name in rank if not name.startswith("draft")}
    unfilled = sorted(own - filled)
    if not unfilled:
        return None
    return f"it holds {len(unfilled)} tensors that the update did not fill, such as {unfilled[0]}"


def not_taken(changed: Iterable[str], before: Checksums, after: Checksums) -> str | None:
    """A sentence when a tensor of a server kept its old values although new ones were sent, else None."""
    sent = {server_name(name) for name in changed}
    # one rank's part of a tensor may stay equal while another rank's changes
    ranks = zip(before, after, strict=True)
    new = {name for old, now in ranks for name, value in now.items() if old.get(name) != value}
    same = sorted(name for name in sent - new if any(name in rank for rank in after))
    return f"{len(same)} of its tensors kept their old values, such as {same[0]}" if same else None


def odd_ones_out(held: Mapping[str, Checksums]) -> dict[str, str]:
    """Servers whose checksums differ from those of the majority, by url, and why; all servers if there is no majority.

    Args:
        held: checksums by url, of servers that hold their tensors in equal pieces.
    """
    contents = {url: tuple(tuple(sorted(rank.items())) for rank in ranks) for url, ranks in held.items()}
    counted = Counter(contents.values()).most_common(2)
    if len(counted) < 2:
        return {}
    right = None if counted[0][1] == counted[1][1] else counted[0][0]
    model = next(url for url, content in contents.items() if content == counted[0][0])
    failures = {}
    for url, content in contents.items():
        if content != right:
            other = model if url != model else next(u for u in contents if contents[u] != content)
            failures[url] = f"its weights differ from those of {other}{_first_difference(held[url], held[other])}"
    return failures


def _first_difference(one: Checksums, other: Checksums) -> str:
    for a, b in zip(one, other, strict=False):
        differing = [name for name in a.keys() | b.keys() if a.get(name) != b.get(name)]
        if differing:
            return f", first in {min(differing)}"
    return ""
