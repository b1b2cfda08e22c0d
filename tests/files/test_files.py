"""A file holds its old content or its new one, whatever happens while it is written."""

from pathlib import Path

import pytest
from refusals import refuses

from megatron_rc.files import read_json, replace_file, replace_folder, replace_text


def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    replace_text(path, "old")
    with pytest.raises(KeyError), replace_file(path) as unfinished:
        unfinished.write_text("half of the n")
        raise KeyError
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]
    replace_text(path, "nëw")
    assert path.read_text(encoding="utf-8") == "nëw" and [*tmp_path.iterdir()] == [path]


def test_a_folder_takes_the_place_of_the_one_that_had_its_name(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    replace_folder(tmp_path / "new", tmp_path / "old")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["old", "old/new"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "no such file: '.*a.json'"),
        (b"{", "a.json is not valid JSON: "),
        (b"\xff", "a.json is not valid JSON: "),
        (b"[1]", "a.json must hold a JSON object, got list"),
    ],
)
def test_other_json_than_an_object_names_the_file(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    assert "\n" not in refuses(sentence, read_json, path)
