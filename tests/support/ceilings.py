"""How large this repository may become, by area. Raising a number is one line of a commit, with its reason."""

LINES = {"megatron_rc": 44_252, "triton_kernels": 3_141, "tests": 42_632, "benchmarks": 7_082, "": 97_961}
"""Lines of Python below each folder and ("") in all."""

WORDS = 40_850
"""Words of the documents in docs/ that are written by hand."""

GENERATED = (
    "settings", "presets", "metrics", "versions", "collapse", "collapse_evidence", "gradients", "rules/confusion",
    "rules/reference", "hosts/support", "real", "atlas", "analyze_json",
)  # fmt: skip
"""Documents that a command prints (see `make docs`), or that a test holds to the code row by row."""

SECONDS: dict[str, tuple[float, float]] = {
    "tests/analyze": (135, 0), "tests/contracts": (87, 0), "tests/correction": (35, 0),
    "tests/doctor": (93, 0), "tests/integrations": (155, 0), "tests/jobs": (104, 0), "tests/kernels": (112, 345),
    "tests/launch": (82, 0), "tests/learning_rate": (23, 0), "tests/logprobs": (43, 7), "tests/models": (18, 0),
    "tests/moe": (43, 0), "tests/report": (23, 0), "tests/rollout": (108, 0), "tests/training": (72, 0),
}  # fmt: skip
"""Seconds of the tests in a folder, plain and interpreted, by three workers on two quiet cores, together. A run that
takes 1.5 times as long says so and does not fail: the time tells as much about the machine as about the tests."""
