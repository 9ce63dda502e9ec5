"""Build entry. The metadata stands in pyproject.toml; compiled parts are added here when there are some."""

from setuptools import setup

setup()
