"""A function of a host is replaced under every name that a loaded module has for it, and put back exactly."""

import sys
from types import ModuleType

import pytest

from megatron_rc.integrations.installed import rebind

SOURCE = """
from collections import OrderedDict
from functools import partial

def loss(*args):
    return ("host", len(args))

alias, table, steps, fixed = loss, {"ppo": loss, "other": 1}, [loss], (loss, loss)
ordered, known, bound = OrderedDict(ppo=loss), {loss}, partial(loss, 1)

class Trainer:
    loss_fn, static, table = loss, staticmethod(loss), {"ppo": loss}

    class Inner:
        pass
"""


def answers(module: ModuleType) -> list[tuple[str, int]]:
    trainer = module.Trainer()
    calls = [module.loss, module.alias, module.table["ppo"], module.steps[0], trainer.loss_fn, trainer.static]
    return [call() for call in [*calls, trainer.table["ppo"], module.ordered["ppo"]]]


def test_every_alias_is_rebound_and_what_cannot_change_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def ours(*args: object) -> tuple[str, int]:
        return ("ours", len(args))

    host = ModuleType("aliased_host")
    exec(SOURCE, vars(host))
    monkeypatch.setitem(sys.modules, "aliased_host", host)
    original, before = host.loss, answers(host)
    assert before == [("host", 0)] * 4 + [("host", 1)] + [("host", 0)] * 3
    assert rebind({original: ours}) == tuple(f"aliased_host.{name}" for name in ("fixed", "known", "bound"))
    assert answers(host) == [("ours", count) for _, count in before]
    assert host.fixed == (original, original) and host.table["other"] == 1
    assert rebind({ours: original}) == ()
    assert answers(host) == before


def test_modules_that_know_no_host_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    known, unknown = ModuleType("aliased_host"), ModuleType("torch.aliased")
    for module in (known, unknown):
        exec("def loss(): pass", vars(module))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    unknown.loss = original = known.loss  # type: ignore[attr-defined]
    rebind({original: len})
    assert known.loss is len and unknown.loss is original  # type: ignore[attr-defined]
