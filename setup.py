"""Finds the packages, which pyproject.toml cannot: the folders lie flat, without a common root."""

from setuptools import find_packages, setup

FOLDERS = ("chain", "train", "quantize", "deploy", "recipes")

setup(
    packages=[
        f"polybasic.{package}"
        for package in find_packages(include=[*FOLDERS, *(f"{folder}.*" for folder in FOLDERS)])
    ]
)
