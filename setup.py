"""What pyproject.toml cannot say: the wheel carries the kernels' sources, and libraries where they could be made.

The CPU's are compiled now, by the machine's compiler or ziglang's; without one torch serves. The CUDA ones are not:
without ``make kernels`` they are compiled by NVRTC when they are first used on a GPU.
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
    """Compiles the CPU kernels; copies sources and libraries into the package, ``make kernels``' too if it was made."""

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
    """A distribution with its packages in platlib where kernels are compiled.

    auditwheel refuses shared libraries in purelib.
    """

    def has_ext_modules(self) -> bool:
        compiled = (HERE / "kernels" / "kvkernels" / "lib").is_dir()
        return compiled or (bool(CPU["variants"]()) and CPU["compiler"]() is not None)


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and every Python 3: ctypes loads the libraries, which use nothing of Python's ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if platform == "any" else ("py3", "none", platform)


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel}, distclass=DistributionWithKernels)
