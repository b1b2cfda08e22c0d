"""patch(): what is replaced, what is refused before anything is, and that undoing leaves no trace."""

import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rc import RolloutCorrection, patch
from megatron_rc.integrations import hosts, symbols
from megatron_rc.integrations.symbols import Host, Symbol
from megatron_rc.learning_rate.length_decay import LengthDecaySettings

NONE = RolloutCorrection()
SOURCE = """
import functools

def logged(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

def loss(x, scale=1.0, *, mask=None):
    return "host loss"

@logged
def decorated(x):
    return "host decorated"

class Scheduler:
    def step(self, increment: int) -> str:
        return "host step"
"""
SYMBOLS = {"loss": "x, scale=1.0, *, mask=None", "decorated": "x", "Scheduler.step": "self, increment"}


def make(original: Any, context: Any) -> Any:
    context.originals.append(original)

    def ours(*args: Any, **kwargs: Any) -> str:
        return "ours, not " + original(*args, **kwargs)

    return ours


def host(**changes: Any) -> Host:
    symbols = tuple(Symbol("tiny_host.core", *names, make, f"makes {names[0]} ours") for names in SYMBOLS.items())
    fields: dict[str, Any] = {"name": "tiny", "module": "tiny_host.core", "symbols": symbols, "versions": ("1.2",)}
    fields |= {"read_version": lambda: "1.2.3", "differences": ("it answers otherwise",)}
    fields |= {"prepare": lambda correction, lr_rule: SimpleNamespace(originals=[], released=0)}
    return Host(**{**fields, **changes})


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with a module that is patched, and one that imports from it by value."""
    package = tmp_path / "tiny_host"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "core.py").write_text(SOURCE)
    (package / "user.py").write_text("from tiny_host.core import Scheduler, decorated, loss\n")
    (package / "late.py").write_text("from tiny_host.core import loss\n")
    (package / "other.py").write_text("def loss(x):\n    return 'another'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(hosts, "HOSTS", {"tiny": host()})
    yield package
    for name in [name for name in sys.modules if name.split(".")[0] == "tiny_host"]:
        del sys.modules[name]


def module(name: str) -> Any:
    return importlib.import_module(f"tiny_host.{name}")


def use(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    monkeypatch.setattr(hosts, "HOSTS", {"tiny": host(**changes)})


def bindings() -> dict[str, Any]:
    found = {f"{part}.{name}": vars(module(part))[name] for part in ("core", "user") for name in ("loss", "decorated")}
    return {**found, "step": vars(module("core").Scheduler)["step"]}


def test_functions_methods_and_names_imported_by_value_are_replaced_and_restored_exactly() -> None:
    before = bindings()
    patched = patch("tiny", correction=NONE)
    assert module("core").loss(1) == module("user").loss(1) == "ours, not host loss"
    assert module("user").decorated(1) == "ours, not host decorated"
    assert module("user").Scheduler().step(1) == "ours, not host step"
    assert not set(map(id, before.values())) & set(map(id, bindings().values()))
    patched.undo()
    assert bindings() == before
    with pytest.raises(KeyError), patch("tiny", correction=NONE):
        raise KeyError
    assert bindings() == before, "a block that ends by an exception"


def test_a_module_imported_while_patched_is_restored_too_and_another_function_of_the_name_is_left_alone() -> None:
    module("other")
    with patch("tiny", correction=NONE):
        assert module("late").loss(1) == "ours, not host loss"
        assert module("other").loss(1) == "another", "a function of the same name"
    assert module("late").loss is module("core").loss
    assert module("late").loss(1) == "host loss"


def test_what_keeps_a_function_of_the_host_is_named_in_the_report(files: Path) -> None:
    (files / "table.py").write_text("from tiny_host.core import loss as my_loss\nTABLE = (my_loss,)\n")
    table = module("table")
    with patch("tiny", correction=NONE) as patched:
        assert table.my_loss(1) == "ours, not host loss" and table.TABLE[0](1) == "host loss"
        assert "still the host's own, in what cannot be changed: tiny_host.table.TABLE" in patched.report()
    assert table.my_loss(1) == "host loss" and "cannot be changed" not in patched.report()


def test_a_host_in_parts_is_patched_as_its_modules_arrive_and_not_after_undo(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, in_parts=True)
    patch("tiny", correction=NONE).undo()
    assert module("core").loss(1) == "host loss"
    del sys.modules["tiny_host.core"]
    patched = patch("tiny", correction=NONE)
    assert "tiny_host.core" not in sys.modules
    assert "to be replaced once this process imports them: tiny_host.core.loss, " in patched.report()
    assert module("late").loss(1) == module("core").loss(1) == "ours, not host loss"
    assert module("core").Scheduler().step(1) == "ours, not host step"
    patched.undo()
    assert module("late").loss(1) == module("core").loss(1) == "host loss"


def test_a_part_that_cannot_be_patched_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(original: Any, context: Any) -> None:
        raise ValueError("not this one")

    use(monkeypatch, in_parts=True, symbols=(Symbol("tiny_host.core", "loss", SYMBOLS["loss"], refuses, ""),))
    with patch("tiny", correction=NONE):
        for _ in range(2):
            with pytest.raises(ValueError, match="not this one"):
                module("core")


@pytest.mark.parametrize(("name", "parameters"), [("loss", "x, scale"), ("absent", "x")])
def test_a_symbol_that_these_settings_do_not_need_may_be_missing_or_have_changed(
    name: str, parameters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    conditional = Symbol("tiny_host.core", name, parameters, make, "", lambda session: session.wanted)
    state = SimpleNamespace(originals=[], released=0, wanted=True)
    use(monkeypatch, symbols=(conditional, *host().symbols[1:]), prepare=lambda correction, lr_rule: state)
    with pytest.raises(ValueError, match=f"tiny cannot be patched: tiny_host.core.{name} "):
        patch("tiny", correction=NONE)
    state.wanted = False
    with patch("tiny", correction=NONE) as patched:
        assert module("core").loss(1) == "host loss" and name not in patched.report()
        assert module("core").decorated(1) == "ours, not host decorated"


def test_patching_again_with_equal_settings_nests_and_wraps_nothing_twice_and_undoing_twice_counts_once() -> None:
    before = bindings()
    outer = patch("tiny", correction=NONE)
    once = bindings()
    with patch("tiny", correction=RolloutCorrection()) as inner:
        assert bindings() == once
        for _ in range(2):
            outer.undo()
            assert inner.active and not outer.active and bindings() == once
    assert bindings() == before


def test_other_settings_on_a_patched_host_are_refused() -> None:
    with patch("tiny", correction=NONE):
        for other in ({"correction": "token-tis"}, {"correction": NONE, "lr_rule": LengthDecaySettings()}):
            with pytest.raises(ValueError, match="already patched with other settings"):
                patch("tiny", **other)
    with patch("tiny", correction="token-tis"):
        patch("tiny", correction=RolloutCorrection.preset("token-tis")).undo()


def test_a_head_without_logits_is_for_hosts_that_show_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="head must be 'logits' with host 'tiny', got 'linear'"):
        patch("tiny", correction=NONE, head="linear")
    with pytest.raises(ValueError, match="correction must be given with head='linear'"):
        patch("tiny", lr_rule=LengthDecaySettings(), head="linear")
    session = functools.partial(SimpleNamespace, originals=[], released=0)
    use(monkeypatch, prepare=lambda _, __, head=None: session(head=head), heads=("logits", "linear"))
    with patch("tiny", correction=NONE, head="linear") as patched:
        assert patched._installed.session.head.head == "linear" and "head: linear\n" in patched.report() + "\n"
        for other in ({}, {"head": "linear", "head_chunk": 8}):
            with pytest.raises(ValueError, match="already patched with other settings"):
                patch("tiny", correction=NONE, **other)
    with patch("tiny", correction=NONE, head="linear", head_chunk=8, head_logits_dtype="fp32") as patched:
        assert "head: linear, head_chunk 8, head_logits_dtype fp32" in patched.report()


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (SOURCE.replace("def loss(x", "def cost(x"), "tiny_host.core.loss is missing"),
        (SOURCE.replace("class Scheduler", "class Schedule"), "tiny_host.core.Scheduler.step is missing"),
        (SOURCE.replace("scale=1.0", "scale=2.0"), r"loss takes \(x, scale=2.0, \*, mask=None\)"),
        (SOURCE.replace("increment: int", "increment: int, wait"), r"step takes \(self, increment, wait\)"),
    ],
)
def test_a_missing_or_changed_symbol_is_named_before_any_is_replaced(files: Path, source: str, sentence: str) -> None:
    (files / "core.py").write_text(source)
    before = dict(vars(module("core")))
    with pytest.raises(ValueError, match=sentence):
        patch("tiny", correction=NONE)
    assert dict(vars(module("core"))) == before


def test_a_newer_host_with_optional_parameters_more_is_patched_and_the_report_says_what_is_new(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files / "core.py").write_text(SOURCE.replace("mask=None)", "mask=None, clock=None)").replace("(x):", "(x, y=0):"))
    use(monkeypatch, read_version=lambda: "1.20", tested="1.2.3")
    monkeypatch.setattr(symbols, "known_bodies", lambda: {"tiny_host.core.loss": {"another body"}})
    with patch("tiny", correction=NONE) as patched:
        assert "their code is not that of 1.2.3: tiny_host.core.loss; compare a step" in patched.report()
        assert "newer than 1.2: its 3 symbols take what ours pass" in patched.report()
        assert "new there: tiny_host.core.loss takes clock; tiny_host.core.decorated takes y" in patched.report()


@pytest.mark.parametrize("hidden", [False, True])
def test_a_symbol_that_somebody_else_replaced_is_refused(monkeypatch: pytest.MonkeyPatch, hidden: bool) -> None:
    own = module("core").loss

    def foreign(*args: Any, **kwargs: Any) -> str:
        return "foreign"

    monkeypatch.setattr(module("core"), "loss", functools.wraps(own)(foreign) if hidden else foreign)
    with pytest.raises(ValueError, match=r"tiny_host.core.loss is not the function of .*somebody else"):
        patch("tiny", correction=NONE)
    assert module("core").decorated(1) == "host decorated"


def test_undo_refuses_when_somebody_replaced_a_symbol_after_patch() -> None:
    patched, core = patch("tiny", correction=NONE), module("core")
    ours, core.loss = core.loss, lambda x: "foreign"
    with pytest.raises(ValueError, match="tiny_host.core.loss was replaced after patch"):
        patched.undo()
    assert patched.active and core.decorated(1) == "ours, not host decorated"
    core.loss = ours
    patched.undo()
    assert core.loss(1) == "host loss"


def test_a_refusal_of_the_host_leaves_it_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(correction: Any, lr_rule: Any) -> Any:
        raise ValueError("old must be 'recompute'")

    use(monkeypatch, prepare=refuse)
    before = bindings()
    with pytest.raises(ValueError, match="old must be 'recompute'"):
        patch("tiny", correction=NONE)
    assert bindings() == before
    use(monkeypatch)
    patch("tiny", correction=NONE).undo()


def test_what_replacements_attached_is_released_with_the_last_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    released = []
    use(monkeypatch, release=released.append)
    outer, inner = patch("tiny", correction=NONE), patch("tiny", correction=NONE)
    outer.undo()
    assert not released
    inner.undo()
    assert [len(context.originals) for context in released] == [3]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"read_version": lambda: "1.1.9"}, r"tiny must be of version 1.2, found 1.1.9"),
        ({"read_version": lambda: None}, r"tiny must be of version 1.2, found None"),
        ({"module": "tiny_host.absent"}, "no module tiny_host.absent"),
    ],
)
def test_an_unknown_version_or_absent_host_is_refused(monkeypatch: Any, changes: Any, sentence: str) -> None:
    use(monkeypatch, **changes)
    with pytest.raises(ValueError, match=sentence):
        patch("tiny", correction=NONE)


def test_a_host_whose_import_fails_says_why(files: Path) -> None:
    (files / "core.py").write_text("import not_installed_anywhere\n" + SOURCE)
    with pytest.raises(ValueError, match=r"importing tiny_host.core failed: .*not_installed_anywhere"):
        patch("tiny", correction=NONE)


def test_nothing_to_do_and_an_unknown_host_are_refused() -> None:
    with pytest.raises(ValueError, match="correction or lr_rule must be given"):
        patch("tiny")
    with pytest.raises(ValueError, match="host must be 'auto' or one of 'tiny', got 'huge'"):
        patch("huge", correction=NONE)
    with pytest.raises(ValueError, match="correction must be a RolloutCorrection or the name of a preset, .* got list"):
        patch("tiny", correction=["token-tis"])  # type: ignore[arg-type]


def test_auto_takes_the_only_importable_host_and_prefers_it_to_what_it_contains(monkeypatch: Any) -> None:
    absent, inner = host(name="absent", module="absent_host"), host(name="inner")
    monkeypatch.setattr(hosts, "HOSTS", {"absent": absent, "tiny": host()})
    patch(correction=NONE).undo()
    monkeypatch.setattr(hosts, "HOSTS", {"inner": inner, "tiny": host(contains=("inner",))})
    with patch(correction=NONE) as patched:
        assert patched.report().startswith("tiny 1.2.3")
    for table in ({"absent": absent}, {"inner": inner, "tiny": host()}):
        monkeypatch.setattr(hosts, "HOSTS", table)
        with pytest.raises(ValueError, match="host must be one of .*'auto' needs one"):
            patch(correction=NONE)
