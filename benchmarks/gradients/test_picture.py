"""The picture of docs/gradients.md is what the code draws from the committed rows."""

from pathlib import Path

import pytest
from pictures import same_picture

from gradients.picture import draw
from gradients.rows import Row
from gradients.truth import PICTURE, ROWS
from megatron_rc.files import read_csv


@pytest.mark.full
def test_the_committed_picture_is_that_of_the_code(tmp_path: Path) -> None:
    rows = read_csv(Row, ROWS)
    assert same_picture(draw(rows, tmp_path / "estimates.png"), PICTURE), "make docs"
    other = [row._replace(cosine=0.0) if row.estimator == "token-tis" else row for row in rows]
    assert not same_picture(draw(other, tmp_path / "other.png"), PICTURE)
