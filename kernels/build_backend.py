"""setuptools' build backend, which also asks for a compiler where the machine has none."""

import runpy
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

_CPU = runpy.run_path(str(Path(__file__).parent / "kvkernels" / "cpu" / "build.py"))


def _with_compiler(requires):
    return [*requires, "ziglang>=0.13"] if _CPU["asks_for_ziglang"]() else requires


def get_requires_for_build_wheel(config_settings=None):
    return _with_compiler(build_meta.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings=None):
    return _with_compiler(build_meta.get_requires_for_build_editable(config_settings))
