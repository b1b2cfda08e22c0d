"""How large this repository may become, by area. Raising a number is one line of a commit, with its reason."""

LINES = {"megatron_rc": 38_510, "triton_kernels": 3_090, "tests": 43_770, "benchmarks": 8_230, "": 94_210}
"""Lines of Python below each folder and ("") in all. They are to fall to 38,500, 3,090, 43,500, 8,200 and 94,000."""

WORDS = 60_000
"""Words of the documents in docs/ that are written by hand."""

GENERATED = ("settings", "presets", "metrics", "versions", "collapse", "gradients", "rules/confusion", "hosts/support")
"""Documents that a command prints; see `make docs`."""

SECONDS: dict[str, tuple[float, float]] = {}
"""Seconds of the tests in a folder, plain and interpreted, on two quiet cores. A run that takes 1.5 times as long says
so and does not fail: the time tells as much about the machine as about the tests."""
