"""Take the pictures of the page of a sick dump that README.md shows, on light and on dark ground.

    python benchmarks/diagnosis/page_pictures.py    # needs Debian's chromium: apt-get install chromium

A picture carries the digest of what it shows, so that a test without a browser finds one that is out of date.
"""

import hashlib
import subprocess
import tempfile
from pathlib import Path

from PIL import Image, PngImagePlugin

from megatron_rc.analyze.diagnosis import diagnose_dump
from megatron_rc.analyze.pages import html

ROOT = Path(__file__).parents[2]
DUMP = "examples/dumps/sick.parquet"
PICTURES = {ROOT / f"docs/images/analysis-{name}.png": name == "dark" for name in ("light", "dark")}
"""Maps the path of a picture to whether its ground is dark."""
SIZE = "1400,880"
MARK = "Description"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars")


def page() -> str:
    """The page of the command that is started in the repository."""
    return html.page(diagnose_dump(str(ROOT / DUMP))).replace(".../sick.parquet", DUMP)


def digest(text: str) -> str:
    """Checksum of the part of the page that the pictures show: the style sheet, and all before the charts."""
    return hashlib.sha256(text.partition('<section class="panels">')[0].encode()).hexdigest()


def take(text: str, path: Path, *, dark: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shown, shot = Path(folder) / "page.html", Path(folder) / "shot.png"
        shown.write_text(text, encoding="utf-8")
        look = (f"--window-size={SIZE}", f"--blink-settings=preferredColorScheme={0 if dark else 1}")
        command = ["chromium", *FLAGS, *look, f"--user-data-dir={folder}/user", f"--screenshot={shot}", shown.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        notes = PngImagePlugin.PngInfo()
        notes.add_text(MARK, digest(text))
        # the page has few colours: a palette halves the file
        Image.open(shot).convert("RGB").quantize(128).save(path, pnginfo=notes, optimize=True)


if __name__ == "__main__":
    for path, dark in PICTURES.items():
        take(page(), path, dark=dark)
