"""The examples of docs/methods.md run, and print or assert what the page says."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"


def test_the_examples_of_the_page_of_methods_hold() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    exec("\n".join(blocks), {})
