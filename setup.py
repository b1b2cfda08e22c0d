"""Build of megatron_rc. Only the folders of megatron_rc are installed, no other folder of the repository."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def version() -> str:
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "megatron_rc/__init__.py").read_text(), re.MULTILINE)
    assert found, "megatron_rc/__init__.py states __version__"
    return found[1]


# What a host's container brings has no upper bound, so that installing this package never replaces it. torch and
# megatron-core have no lower one either: containers carry pre-releases such as 2.8.0a0 and 0.16.0rc0, which pip takes
# for older releases.
TRAIN = ["megatron-core", "psutil", "safetensors", "torch", "transformers>=5"]
SGLANG = ["aiohttp", "safetensors", "torch", "transformers>=5"]
REPORT = ["matplotlib", "tensorboard"]
MATH = ["math-verify"]
WANDB = ["wandb>=0.31", "wandb-workspaces"]
TRACKIO = ["trackio"]
EXTRAS = {
    "train": TRAIN,
    "sglang": SGLANG,
    "report": REPORT,
    "math": MATH,
    "wandb": WANDB,
    # the last two keep runs in a local database when there is no server
    "mlflow": ["mlflow-skinny", "sqlalchemy", "alembic"],
    "trackio": TRACKIO,
    "te": ["transformer-engine[pytorch]"],
    "dev": [
        *sorted({*TRAIN, *SGLANG, *REPORT, *MATH, *WANDB, *TRACKIO}),
        "hypothesis",
        "mypy",
        "packaging",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        "ruff",
        "scipy",
        "setuptools>=77",
        "triton; sys_platform == 'linux'",
        "types-PyYAML",
        "types-psutil",
    ],
}

setup(
    name="megatron-rc",
    version=version(),
    description="Rollout correction for RL on Megatron: measure, correct and plot the gap between sampler and trainer",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    keywords=["reinforcement learning", "large language models", "Megatron", "rollout correction"],
    # megatron_rc.kernels is the link megatron_rc/kernels -> ../triton_kernels, which has no __init__.py
    packages=[*find_packages(include=["megatron_rc", "megatron_rc.*"]), "megatron_rc.kernels"],
    package_data={"megatron_rc.kernels": ["README.md"], "megatron_rc.analyze.rules": ["pages/*.md"]},
    install_requires=["numpy", "pyarrow", "pydantic>=2", "pyyaml", "rich", "typer>=0.9"],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["megatron-rc = megatron_rc.cli:main"],
        "verl.plugins": ["megatron_rc = megatron_rc.integrations.verl.plugin"],
    },
)
