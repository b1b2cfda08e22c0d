"""Names of our metrics in the logs of hosts: one file has the prefix, and what a log line has room for."""

from pathlib import Path

from megatron_rc.integrations import log_names

FOLDER = Path(log_names.__file__).parent


def test_the_prefix_of_our_metrics_is_written_in_one_file() -> None:
    having = [path for path in FOLDER.rglob("*.py") if log_names.PREFIX in path.read_text()]
    assert having == [FOLDER / "log_names.py"]


def test_a_log_line_has_the_main_metrics_and_the_shares_of_bounds_and_rejections() -> None:
    values = {"k3": 1.0, "truncated_token": 2.0, "rejected_k3_sequence_mean": 3.0, "prob_correlation": 4.0}
    assert log_names.worth_logging(values) == {name: values[name] for name in list(values)[:3]}
    assert log_names.prefixed({"k3": 1.0}) == {"rc/k3": 1.0}
