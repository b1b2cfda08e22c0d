"""Words with one meaning each, and where classes, functions, fields and files may have them in their names."""

from typing import NamedTuple


class Word(NamedTuple):
    meaning: str
    places: tuple[str, ...]
    """Starts of paths, without megatron_rc/."""
    exceptions: dict[str, str] = {}  # noqa: RUF012
    """Names that may have the word elsewhere -> the reason."""


JOB_SETTING = "a setting or a command line option of that name"

WORDS = {
    "gate": Word(
        "a rejection of the correction",
        ("correction/", "triton_kernels/"),
        {"gate_distance": "the router of a layer, as checkpoints call it",
         "_gate_names": "rejections, in slime's metrics"},
    ),
    "plan": Word(
        "what the kernels and their twin read of a correction", ("correction/",), {"plan": "the command of a dry run"},
    ),
    "checkpoint": Word(
        "what a trainer saves and resumes from",
        ("training/", "settings/train.py", "integrations/slime/hooks/"),
        {"HfCheckpoint": "a folder in the layout of Hugging Face, always with its prefix", "hf_checkpoint": "the same",
         "Checkpoint": "the same, in hf_checkpoint.py", "read_checkpoint": "the same", "checkpoint_rules": "the same"},
    ),
    "dump": Word(
        "the batches of a run, written to be read by analyze",
        ("dump/", "analyze/", "training/", "settings/", "integrations/slime/flag_rules.py",
         "integrations/verl/dump.py"),
        {"dump_yaml": "the word of YAML libraries", "dump": JOB_SETTING},
    ),
    "lag": Word(
        "number of updates since a token was sampled",
        ("batch.py", "correction/", "triton_kernels/", "settings/", "integrations/megatron_lm/", "report/panels.py",
         "analyze/pages/by_bin.py", "analyze/statistics/factors.py"),
        dict.fromkeys(("LagSums", "at_lag", "best_lag", "lag_correlations"), "the shift of a correlation")
        | dict.fromkeys(("LeadLag", "lag", "lead_lag"), "the steps by which a series follows another"),
    ),
    "staleness": Word("the ratio train / sampling of one token", ("correction/", "triton_kernels/")),
    "head": Word(
        "the language-model head",
        ("logprobs/", "training/", "settings/", "integrations/", "launch/memory.py"),
        {"head_dim": "of attention, as in config.json", "_head": "the start of a file"},
    ),
    "top": Word(
        "the most probable ids of a distribution",
        ("engine.py", "settings/rollout.py", "rollout/sglang/request.py", "doctor/server/sampling.py",
         "analyze/pages/tokens.py"),
        {"top_k": "also the experts per token, as in config.json"},
    ),
}  # fmt: skip
