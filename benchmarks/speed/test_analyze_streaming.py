"""Memory that does not grow with the dump, and time that grows with its tokens."""

from pathlib import Path

import pytest

from speed import analyze_streaming


def test_a_million_tokens_are_analyzed_in_bounded_memory(tmp_path: Path) -> None:
    analyze_streaming.write_dump(tmp_path / "dump.parquet", 1_000_000)
    measured = analyze_streaming.measure(tmp_path / "dump.parquet")
    assert measured.tokens > 900_000
    assert measured.codes == ["RC501"]
    assert measured.peak_mb < 600


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_gigabyte_takes_three_minutes_and_a_gigabyte_and_time_is_linear(tmp_path: Path) -> None:
    measured = []
    for tokens in (10_000_000, 100_000_000):
        path = tmp_path / f"{tokens}.parquet"
        analyze_streaming.write_dump(path, tokens)
        measured.append(analyze_streaming.measure(path))
        path.unlink()
    small, large = measured
    assert large.file_mb > 900
    assert large.seconds < 180 and large.peak_mb < 1024
    assert large.cpu_seconds / large.tokens < 1.5 * small.cpu_seconds / small.tokens
