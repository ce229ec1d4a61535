"""Build steps beyond pyproject.toml: the wheel contains kernel sources and compiled libraries.

CPU kernels are compiled during the build, by the machine's compiler or ziglang's; without a compiler, torch's kernels
are used. CUDA kernels are not compiled during the build: without ``make kernels``, NVRTC compiles them at first use on
a GPU.
"""

import runpy
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
CPU = runpy.run_path(str(HERE / "kernels" / "kvkernels" / "cpu" / "cpu_build.py"))


class BuildWithKernels(build_py):
    """Compiles the CPU kernels; copies sources and libraries into the package, CUDA libraries if they were built."""

    def run(self) -> None:
        super().run()
        try:
            CPU["build"]()
        except (RuntimeError, OSError) as error:
            print(f"warning: torch will serve instead of the CPU kernels: {error}", file=sys.stderr)
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "kvkernels"
        for folder, target in (("cuda", "sources/cuda"), ("cpu", "sources/cpu"), ("kvkernels/lib", "lib")):
            if (HERE / "kernels" / folder).is_dir():
                shutil.copytree(HERE / "kernels" / folder, package / target, dirs_exist_ok=True)


class DistributionWithKernels(Distribution):
    """Distribution whose packages go to platlib if kernels are compiled.

    auditwheel refuses shared libraries in purelib.
    """

    def has_ext_modules(self) -> bool:
        compiled = (HERE / "kernels" / "kvkernels" / "lib").is_dir()
        return compiled or (bool(CPU["variants"]()) and CPU["compiler"]() is not None)


class PlatformWheel(bdist_wheel):
    """Wheel for one platform and every Python 3: ctypes loads the libraries, which do not use Python's ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if platform == "any" else ("py3", "none", platform)


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel}, distclass=DistributionWithKernels)
