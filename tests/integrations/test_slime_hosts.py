"""What slime and miles look like from outside: signatures around the hooks, the calls of the hooks, the example."""

import ast
import inspect
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hosts.slime import sources
from hosts.slime.host import arguments, hooks, inside, naming

from megatron_rc import RolloutCorrection
from megatron_rc.integrations import slime
from megatron_rc.integrations.hosts import HOSTS as KNOWN
from megatron_rc.integrations.patching import patch
from megatron_rc.integrations.slime.settings import ENABLE, HOOKS, SlimeSettings, is_enabled, names, path_of, read
from megatron_rc.integrations.symbols import Host, inspect_symbols
from megatron_rc.learning_rate.length_decay import LengthDecaySettings

HOSTS = {name: KNOWN[name] for name in ("slime", "miles")}


def written(folder: Path, host: Host) -> None:
    """A source tree of stubs: every symbol of the host with its parameters."""
    for symbol in host.symbols:
        path = folder / Path(*symbol.module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in [*path.parents][: len(symbol.module.split(".")) - 1]:
            (parent / "__init__.py").touch()
        *classes, function = symbol.name.split(".")
        body = "".join(f"class {name}:\n    " for name in classes)
        with path.open("a") as file:
            file.write(f"{body}def {function}({symbol.parameters}): ...\n")


@pytest.mark.parametrize("host", HOSTS)
def test_patch_replaces_nothing_of_the_host_and_names_a_missing_symbol(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    written(tmp_path, HOSTS[host])
    for _ in range(2):
        patched = patch(host, correction=RolloutCorrection())
        assert patched.recipe is not None and not patched.active
    assert not any(name.partition(".")[0] == host for name in sys.modules)
    (tmp_path / host / "utils/misc.py").write_text("")
    with pytest.raises(ValueError, match=f"^{host} cannot be patched: {host}.utils.misc.load_function is missing"):
        patch(host, correction=RolloutCorrection())


@pytest.mark.parametrize("host", HOSTS)
def test_patch_answers_with_a_recipe_wherever_it_is_called_which_is_no_context_of_a_patched_host(host: str) -> None:
    decay = LengthDecaySettings(decay_period=204)
    patched = patch(host, correction=RolloutCorrection.preset("token-tis"), lr_rule=decay)
    assert patched.recipe is not None
    assert patched.recipe.flags == ["--custom-config-path rc.yaml", ENABLE]
    settings = read(arguments(**patched.recipe.config))
    assert (settings.correction, settings.lr_rule) == (RolloutCorrection.preset("token-tis"), decay)
    report = patched.report()
    assert report.startswith(f"{host}, not patched") and all(one in report for one in patched.recipe.flags)
    assert yaml.safe_load(report.split("rc.yaml:\n")[1].split("and add to")[0]) == patched.recipe.config
    with pytest.raises(ValueError, match=f"^{host} trains in processes of its own.*slime.enable"), patched:
        pytest.fail("the block ran")


@pytest.mark.host("slime", "miles", proof="own code", feature="symbols where they are expected")
@pytest.mark.parametrize("host", HOSTS)
def test_the_real_sources_have_the_symbols(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(sources.tree(host)))
    assert [found.problem for found in inspect_symbols(HOSTS[host])] == [None] * len(HOSTS[host].symbols)


def calls(path: Path, function: str) -> list[tuple[int, set[str]]]:
    """(positional arguments, keywords) of every call of ``function`` in a file, whose name may be an attribute."""
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    mine = [node for node in found if getattr(node.func, "id", getattr(node.func, "attr", "")) == function]
    return [(len(node.args), {str(k.arg) for k in node.keywords}) for node in mine]


@pytest.mark.parametrize("host", HOSTS)
def test_the_real_sources_call_the_hooks_as_they_are_defined(host: str) -> None:
    folder = sources.tree(host)
    losses = {"slime": "megatron_utils/loss.py", "miles": "training_utils/loss_hub/losses.py"}
    loss_file, trainer = folder / f"{host}/backends/{losses[host]}", folder / f"{host}/backends/megatron_utils"
    given = [node.value for node in ast.walk(ast.parse(loss_file.read_text())) if isinstance(node, ast.Assign)
             and ast.unparse(node.targets[0]) == "tis_kwargs"]  # fmt: skip
    (tis_kwargs,) = [{ast.literal_eval(k) for k in each.keys if k} for each in given if isinstance(each, ast.Dict)]
    called: dict[Callable[..., Any], list[tuple[int, set[str]]]] = {
        hooks.tis: [(0, tis_kwargs)],
        hooks.pg_loss_reducer: calls(loss_file, "custom_pg_loss_reducer_func"),
        hooks.before_train_step: calls(trainer / "model.py", "custom_before_train_step_hook"),
        hooks.before_log_prob: calls(trainer / "model.py", "custom_before_log_prob_hook"),
        hooks.rollout_data: calls(trainer / "actor.py", "rollout_data_postprocess"),
        slime.enable: calls(trainer / "initialize.py", "custom_init"),
    }
    if host == "miles":
        # which hands it no rollout
        assert called.pop(hooks.rollout_data)[0][0] == 1
    for hook, found in called.items():
        assert found, hook
        for positional, keywords in found:
            inspect.signature(hook).bind(*[None] * positional, **dict.fromkeys(keywords))
    text = (folder / host / "utils/arguments.py").read_text()
    for argument in HOOKS.values():
        assert f'"--{argument.replace("_", "-")}"' in text


@pytest.mark.parametrize("host", HOSTS)
def test_the_real_sources_hand_the_loss_what_it_reads(host: str) -> None:
    model = ast.parse((sources.tree(host) / f"{host}/backends/megatron_utils/model.py").read_text())
    (step,) = [n for n in ast.walk(model) if isinstance(n, ast.FunctionDef) and n.name == "train_one_step"]
    text = {node.value for node in ast.walk(step) if isinstance(node, ast.Constant)}
    read_by_us = {"total_lengths", "response_lengths", "loss_masks", "log_probs", "ref_log_probs", "advantages"}
    assert read_by_us | {"rollout_log_probs"} <= text
    loading = (sources.tree(host) / f"{host}/utils/arguments.py").read_text()
    assert "setattr(args, k, v)" in loading  # every key of the YAML file


def test_the_paths_load_as_the_hosts_load_them() -> None:
    assert slime.__all__ == ["HOST", "enable"]
    for path, function in ((ENABLE.split()[1], slime.enable), *((path_of(hook), vars(hooks)[hook]) for hook in HOOKS)):
        module, _, name = path.rpartition(".")
        assert getattr(__import__(module, fromlist=[name]), name) is function
    assert all(names(Namespace(**naming(hook)), hook) for hook in HOOKS)


def test_the_recipe_of_the_docs_is_enabled_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs/hosts/slime.md").read_text()
    recipe = text.split("```bash ", 1)[1].partition("\n")[2].split("```", 1)[0]
    assert len(recipe.splitlines()) <= 10
    key = yaml.safe_load(recipe.split("<<'YAML'\n", 1)[1].split("YAML\n", 1)[0])
    flags = recipe.split("<your flags>", 1)[1].replace("\\\n", " ").split()
    given = {name: value for name, value in zip(flags, [*flags[1:], ""], strict=True) if name.startswith("--")}
    arrived = {name[2:].replace("-", "_"): value.startswith("--") or value for name, value in given.items()}
    args = arguments(**arrived, **key)
    assert is_enabled(args)
    inside("miles", monkeypatch)
    slime.enable(args)
    assert args.use_tis is True and all(names(args, hook) for hook in ("tis", "before_train_step"))


def test_the_example_has_every_field_at_its_default_or_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parents[2] / "examples/slime_rc.yaml"
    key = yaml.safe_load(path.read_text())["megatron_rc"]
    assert key.keys() == SlimeSettings.__dataclass_fields__.keys()
    inside("slime", monkeypatch)
    slime.enable(args := arguments(megatron_rc=key))
    assert read(args).correction == RolloutCorrection.preset("none")
    assert read(args).lr_rule == LengthDecaySettings()
    for name in ("max_nonfinite_share", "inplace_backward", "lr_rule_start", "aggregation", "routes"):
        assert key[name] == getattr(SlimeSettings(), name)


@pytest.mark.parametrize(
    ("name", "text", "release"),
    [
        ("setup.py", 'setup(\n    name="slime",\n    version="0.3.1",\n)\n', "0.3.1"),
        ("pyproject.toml", "[project]\nname = 'slime'\nversion = '0.4.0.dev1'\n", "0.4.0.dev1"),
        ("pyproject.toml", '[tool.black]\npy_version = 310\n[project]\ndynamic = ["version"]\n', None),
        ("setup.py", "setup(version=read_version())\n", None),
    ],
)
def test_the_release_of_a_source_tree_is_the_one_that_its_setup_states(
    name: str, text: str, release: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for host in HOSTS.values():
        (tmp_path / host.name).mkdir()
        (tmp_path / host.name / "__init__.py").touch()
        (tmp_path / name).write_text(text)
        assert host.read_version() == release
