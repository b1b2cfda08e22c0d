"""What documents say of `megatron-rc analyze` is what its code says, and every rule has a picture."""

import pytest
from PIL import Image
from simulated_dumps import TRAPS, world

from diagnosis import analyze_docs, page_pictures, rule_pictures
from megatron_rc.analyze.diagnosis import diagnosis_of
from megatron_rc.analyze.readers.dump import CorruptRows
from megatron_rc.analyze.rules import RULES


@pytest.mark.full
@pytest.mark.parametrize(("code", "trap"), [("RC102", "padded vocabulary"), ("RC303", "one stale server")])
def test_a_picture_shows_both_dumps(code: str, trap: str) -> None:
    assert rule_pictures.DRAWN.keys() <= RULES.keys()
    healthy, sick = (
        diagnosis_of([TRAPS[name][1](world(1))], "dump", "arrays", CorruptRows()).evidence for name in ("honest", trap)
    )
    (axes,) = rule_pictures.picture(code, healthy, sick).axes
    legend = axes.get_legend()
    assert legend is not None
    assert sorted(text.get_text().split(",")[0] for text in legend.get_texts()) == ["healthy", "sick"]


def test_the_pictures_of_the_page_show_the_page_of_today() -> None:
    wanted = page_pictures.digest(page_pictures.page())
    shown = {path.name: Image.open(path).text.get(page_pictures.MARK) for path in page_pictures.PICTURES}
    assert shown == dict.fromkeys(shown, wanted), "python benchmarks/diagnosis/page_pictures.py"


@pytest.mark.parametrize("name", sorted(analyze_docs.BLOCKS))
def test_generated_parts_are_what_the_code_says(name: str) -> None:
    page, body = analyze_docs.BLOCKS[name]
    match = analyze_docs.part(name).search(page.read_text(encoding="utf-8"))
    assert match is not None
    assert match["body"] == body(), "run `make docs`"
