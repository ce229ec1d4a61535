"""Build backend: setuptools with a compiler requirement and a path file.

It requires the ziglang wheel if the machine has no compiler. The path file makes an editable install importable from
every folder. setuptools' own finder is asked only after the path, so a clone named ``kvsidecar`` in the current folder
would hide the package. A package in a folder on the path has precedence over such a clone.
"""

import base64
import hashlib
import os
import runpy
import zipfile
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

_ROOT = Path(__file__).parents[1]
_CPU = runpy.run_path(str(_ROOT / "kernels" / "kvkernels" / "cpu" / "cpu_build.py"))
# Not the repository's root: some of its folders have the names of other packages, such as build.
_ON_PATH = _ROOT / "clients" / "python"
_PATH_FILE = "kvsidecar_on_path.pth"


def _with_compiler(requires):
    return [*requires, "ziglang>=0.13"] if _CPU["needs_ziglang"]() else requires


def get_requires_for_build_wheel(config_settings=None):
    return _with_compiler(build_meta.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings=None):
    return _with_compiler(build_meta.get_requires_for_build_editable(config_settings))


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    _add_file(Path(wheel_directory) / name, _PATH_FILE, f"{_ON_PATH}\n".encode())
    return name


def _add_file(wheel, name, content):
    """Add a file to a wheel and to its RECORD, which stays the last entry (PEP 427)."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    changed = wheel.with_name(f"{wheel.name}.partial")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(changed, "w", zipfile.ZIP_DEFLATED) as new:
        (record,) = (entry for entry in old.infolist() if entry.filename.endswith(".dist-info/RECORD"))
        for entry in old.infolist():
            if entry is not record:
                new.writestr(entry, old.read(entry))
        new.writestr(name, content)
        new.writestr(record, old.read(record) + f"{name},sha256={digest},{len(content)}\n".encode())
    os.replace(changed, wheel)
