"""What pyproject.toml cannot say of the build: the packages, one of which is a link, and where the repository is."""

from runpy import run_path

from setuptools import find_packages, setup

REPOSITORY = run_path("megatron_rc/versions.py")["REPOSITORY"]

setup(
    project_urls={"Repository": REPOSITORY} if REPOSITORY else {},
    # megatron_rc.kernels is the link megatron_rc/kernels -> ../triton_kernels, which has no __init__.py
    packages=[*find_packages(include=["megatron_rc", "megatron_rc.*"]), "megatron_rc.kernels"],
    package_data={
        "megatron_rc": ["py.typed"],
        "megatron_rc.kernels": ["README.md"],
        "megatron_rc.analyze": ["atlas.csv", "demo/*"],
        "megatron_rc.analyze.rules": ["*.md"],
        "megatron_rc.analyze.pages": ["*.css"],
        "megatron_rc.integrations": ["bodies.csv"],
        "megatron_rc.drawing": ["*.css", "*.js"],
        "megatron_rc.jobs": ["*.md"],
    },
)
