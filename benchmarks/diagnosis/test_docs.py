"""What documents say of `megatron-rc analyze` is what its code says, and every trap has its picture and its rule."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from simulated_dumps import TRAPS, evidence_of, world

from diagnosis import analyze_docs, page_pictures, rule_pictures
from megatron_rc.analyze.rules import RULES


@pytest.mark.full
@pytest.mark.parametrize(("code", "trap"), [("RC102", "padded vocabulary"), ("RC303", "one stale server")])
def test_a_picture_shows_both_dumps(code: str, trap: str) -> None:
    assert rule_pictures.DRAWN.keys() <= RULES.keys()
    healthy, sick = (evidence_of(TRAPS[name][1](world(1))) for name in ("honest", trap))
    (axes,) = rule_pictures.picture(code, healthy, sick).axes
    legend = axes.get_legend()
    assert sorted(text.get_text().split(",")[0] for text in legend.get_texts()) == ["healthy", "sick"]


def test_shares_of_the_prompt_are_labelled_in_per_cent() -> None:
    assert [rule_pictures.LABELS["cached"](tenths) for tenths in (0, 3, 10)] == ["0 %", "30 %", "100 %"]


def test_the_pictures_of_the_page_show_the_page_of_today() -> None:
    wanted = page_pictures.digest(page_pictures.page())
    shown = {path.name: Image.open(path).text.get(page_pictures.MARK) for path in page_pictures.PICTURES}
    assert shown == dict.fromkeys(shown, wanted), "python benchmarks/diagnosis/page_pictures.py"


@pytest.mark.parametrize("name", sorted(analyze_docs.BLOCKS))
def test_generated_parts_are_what_the_code_says(name: str) -> None:
    page, body = analyze_docs.BLOCKS[name]
    assert analyze_docs.part(name, page.read_text(encoding="utf-8"))["body"] == body(), "run `make docs`"


@pytest.mark.full
@pytest.mark.timeout(3 * 3600)
def test_every_trap_of_five_seeds_is_answered_by_its_rule_alone(tmp_path: Path) -> None:
    """One and a half hours on two cores; MEGATRON_RC_TRAPS names a folder that keeps models and dumps."""
    folder = os.environ.get("MEGATRON_RC_TRAPS", str(tmp_path))
    command = [sys.executable, "benchmarks/diagnosis/confusion.py", "--server", "--folder", folder, "--seeds", *"01234"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    run = subprocess.run(command, cwd=analyze_docs.ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert run.returncode == 0, run.stdout
    assert len(re.findall(r"5 of 5 \|$", run.stdout, re.MULTILINE)) == 31
