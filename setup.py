"""Finds the packages, which pyproject.toml cannot: the folders lie flat, without a common root."""

from setuptools import find_packages, setup

FOLDERS = ("chain", "train", "quantize", "deploy", "recipes")

# the root is polybasic itself, of which its own modules are found by the build
inner = find_packages(include=[*FOLDERS, *(f"{folder}.*" for folder in FOLDERS)])
setup(
    packages=["polybasic", *(f"polybasic.{package}" for package in inner)],
    script_name="setup.py",  # which lies beside __main__.py, and is no part of the package
)
