"""The pictures of docs/gradients.md are what the code draws from the committed rows."""

from pathlib import Path

import pytest
from pictures import same_picture

from gradients.picture import draw, draw_steps
from gradients.rows import Row
from gradients.steps import Step
from gradients.truth import CONSECUTIVE_PICTURE, CONSECUTIVE_ROWS, PICTURE, ROWS
from megatron_rc.files import read_csv


@pytest.mark.full
def test_the_committed_pictures_are_those_of_the_code(tmp_path: Path) -> None:
    rows, steps = read_csv(Row, ROWS), read_csv(Step, CONSECUTIVE_ROWS)
    assert same_picture(draw(rows, tmp_path / "estimates.png"), PICTURE), "make docs"
    assert same_picture(draw_steps(steps, tmp_path / "steps.png"), CONSECUTIVE_PICTURE), "make docs"
    other = [row._replace(cosine=0.0) if row.estimator == "token-tis" else row for row in rows]
    assert not same_picture(draw(other, tmp_path / "other.png"), PICTURE)
