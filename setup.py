"""What pyproject.toml cannot say of the build: which folders are packages, since one of them is a link."""

from setuptools import find_packages, setup

setup(
    # megatron_rc.kernels is the link megatron_rc/kernels -> ../triton_kernels, which has no __init__.py
    packages=[*find_packages(include=["megatron_rc", "megatron_rc.*"]), "megatron_rc.kernels"],
    package_data={
        "megatron_rc": ["py.typed"],
        "megatron_rc.kernels": ["README.md"],
        "megatron_rc.analyze.rules": ["*.md"],
        "megatron_rc.analyze.pages": ["*.css"],
        "megatron_rc.drawing": ["*.css", "*.js"],
    },
)
