"""megatron-rc patch: the script runs as Python would run it, patched, with its own flags; the recipes of the docs."""

import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_rc import RolloutCorrection
from megatron_rc.cli import app
from megatron_rc.doctor.commands import HOSTS as DOCUMENTED
from megatron_rc.integrations import hosts
from megatron_rc.integrations.hosts import HOSTS
from megatron_rc.integrations.megatron_lm import HOST
from megatron_rc.integrations.run_script import PatchSettings, patch_settings, run_script
from megatron_rc.integrations.run_script import recipe as recipe_of
from megatron_rc.integrations.symbols import Host, Symbol
from megatron_rc.learning_rate.length_decay import LengthDecaySettings

PAGES = {path.stem: path.read_text() for path in (Path(__file__).parents[2] / "docs/hosts").glob("*.md")}
SCRIPT = """
import json, sys
from pathlib import Path
from plain_host import loss
import beside

if __name__ == "__main__":
    main = sys.modules["__main__"]
    seen = {"loss": loss(), "argv": sys.argv, "file": __file__, "path": sys.path[0], "main": main.loss is loss}
    Path(beside.FOLDER, "seen.json").write_text(json.dumps(seen))
    if "--fail" in sys.argv:
        raise ValueError("of the script")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script beside a module of its own, and a host named megatron-lm with one function."""
    (tmp_path / "plain_host.py").write_text("def loss():\n    return 'host'\n")
    (tmp_path / "train_rl.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text(f"FOLDER = {str(tmp_path)!r}\n")

    def make(original: Any, context: Any) -> Any:
        return lambda: f"{context.correction} {context.lr_rule}"

    def prepare(correction: Any, lr_rule: Any) -> Any:
        return SimpleNamespace(correction=correction, lr_rule=lr_rule)

    symbols = (Symbol("plain_host", "loss", "", make, "ours"),)
    host = Host("megatron-lm", "plain_host", symbols, (), lambda: None, prepare)
    monkeypatch.setattr(hosts, "HOSTS", {"megatron-lm": host})
    for name in ("plain_host", "beside"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path / "train_rl.py"


def seen(script: Path) -> dict[str, Any]:
    return json.loads((script.parent / "seen.json").read_text())


def test_the_script_is_main_with_its_own_argv_and_folder_and_everything_is_put_back(script: Path) -> None:
    before = (sys.modules["__main__"], list(sys.argv), list(sys.path))
    correction = RolloutCorrection.preset("token-tis")
    own = ["--lr", "1e-6", "--rc-preset", "its-own"]
    run_script(script, own, PatchSettings(correction=correction))
    expected = {"loss": f"{correction} None", "argv": [str(script), *own], "main": True}
    assert seen(script) == {**expected, "file": str(script), "path": str(script.parent)}
    assert before == (sys.modules["__main__"], sys.argv, sys.path)
    assert sys.modules["plain_host"].loss() == "host"


def test_flags_after_the_script_are_the_scripts_and_those_before_are_ours(script: Path) -> None:
    file = script.parent / "rc.yaml"
    rule = "lr_rule: {rule: length_decay, decay_period: 204}"
    file.write_text(f"correction: {{preset: icepop, normalize: batch}}\n{rule}\n")
    arguments = ["patch", "--rc-config", str(file), "--rc-set", "correction.weight.upper=4.0"]
    done = CliRunner().invoke(app, [*arguments, str(script), "--lr", "1e-6", "-h", "--rc-set", "x=1"])
    assert done.exit_code == 0, done.output
    expected = RolloutCorrection.from_dict({"preset": "icepop", "normalize": "batch", "weight": {"upper": 4.0}})
    found = seen(script)
    assert found["loss"] == f"{expected} {LengthDecaySettings(decay_period=204)}"
    assert found["argv"][1:] == ["--lr", "1e-6", "-h", "--rc-set", "x=1"]
    assert "plain_host.loss: ours" in done.output


def test_an_error_of_the_script_is_shown_whole_and_a_missing_one_is_named(script: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_script(script, ["--fail"], PatchSettings(correction=RolloutCorrection()))
    assert stopped.value.code == 1
    error = capsys.readouterr().err
    assert 'raise ValueError("of the script")' in error and "train_rl.py" in error
    assert sys.modules["plain_host"].loss() == "host"
    with pytest.raises(ValueError, match="no such script: 'absent.py'"):
        run_script(Path("absent.py"), [], PatchSettings(correction=RolloutCorrection()))


@pytest.mark.parametrize(("options", "key"), [((), "correction"), (("--rc-lr-rule", "length_decay"), "lr_rule")])
def test_without_a_script_the_recipe_of_the_host_is_printed(options: tuple[str, ...], key: str) -> None:
    done = CliRunner().invoke(app, ["patch", "--rc-host", "slime", *options])
    assert done.exit_code == 0, done.output
    assert "slime, not patched" in done.output and "rc.yaml" in done.output
    assert f"  {key}:" in done.output and "megatron_rc.integrations.slime.enable" in done.output


def test_a_host_is_named_that_needs_a_script_or_takes_none(script: Path) -> None:
    with pytest.raises(ValueError, match="the training script must be given: megatron-lm is patched in the process"):
        recipe_of(PatchSettings(), host="megatron-lm")
    hosts.HOSTS["slime"] = HOSTS["slime"]
    with pytest.raises(ValueError, match="slime trains in processes of its own"):
        run_script(script, [], PatchSettings(correction=RolloutCorrection()), host="slime")
    assert not (script.parent / "seen.json").exists()


def test_settings_come_from_the_file_the_preset_and_assignments_in_that_order(tmp_path: Path) -> None:
    file = tmp_path / "rc.yaml"
    file.write_text("correction: icepop\nlr_rule: {rule: length_decay, min_lr_ratio: 0.2}\n")
    assert patch_settings(file).correction == RolloutCorrection.preset("icepop")
    found = patch_settings(file, "token-tis", assignments=["correction.normalize=batch", "lr_rule.decay_period=9"])
    assert found.correction == RolloutCorrection(RolloutCorrection.preset("token-tis").weight, normalize="batch")
    assert found.lr_rule == LengthDecaySettings(min_lr_ratio=0.2, decay_period=9)
    assert patch_settings(lr_rule="length_decay") == PatchSettings(lr_rule=LengthDecaySettings())
    assert patch_settings() == PatchSettings()
    with pytest.raises(ValueError, match="unknown field 'correktion'; did you mean 'correction'"):
        patch_settings(assignments=["correktion=none"])


def recipe(language: str) -> str:
    """The first block of that language on the page of Megatron-LM."""
    found = re.search(rf"```{language}\b.*?\n(.*?)```", PAGES["megatron_lm"], re.DOTALL)
    assert found is not None and len(found[1].strip().splitlines()) <= 10
    return found[1]


def test_the_recipe_of_the_command_runs(script: Path) -> None:
    (command,) = [line for line in recipe("bash").replace("\\\n", " ").splitlines() if "torchrun" in line]
    words = shlex.split(command)
    words = words[words.index("megatron_rc") + 1 :]
    place = words.index("train_rl.py")
    done = CliRunner().invoke(app, [*words[:place], str(script), *words[place + 1 :]])
    assert done.exit_code == 0, done.output
    assert seen(script)["argv"][1:] == words[place + 1 :]
    assert seen(script)["loss"].startswith(str(RolloutCorrection.preset("none")))


def test_the_recipe_in_python_runs_and_undoes_itself(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(script.parent)
    exec(recipe("python"), {})
    assert sys.modules["plain_host"].loss() == "host"


@pytest.mark.parametrize("name", ["megatron-lm", "nemo-rl"])
def test_the_docs_have_every_symbol_and_every_intended_difference(name: str) -> None:
    text, host = " ".join(PAGES[name.replace("-", "_")].split()), HOSTS[name]
    for symbol in host.symbols:
        assert f"`{symbol.name if name == 'megatron-lm' else symbol.path}`" in text, symbol.path
    for difference in host.differences:
        assert difference in text, difference
    for known in HOSTS:
        assert f'patch("{known}"' in PAGES["index"], known


def test_every_host_is_in_the_index_and_in_the_help_of_both_commands() -> None:
    assert {*HOSTS} == {*DOCUMENTED}
    for command in ("patch", "doctor"):
        shown = CliRunner().invoke(app, [command, "-h"]).output
        assert all(name in shown for name in HOSTS), command
    rows = [line.split("|")[1] for line in PAGES["index"].splitlines() if line.startswith("| ")]
    for host in HOSTS.values():
        assert any(host.summary and host.summary in row for row in rows), host.name


def test_the_report_in_the_docs_is_the_one_that_is_printed() -> None:
    lines = recipe("text").splitlines()
    assert lines[:2] == ["megatron-lm 0.20.0, patched", "replaced:"]
    assert {*lines[2:]} <= {f"  {symbol.path}: {symbol.summary}" for symbol in HOST.symbols}
