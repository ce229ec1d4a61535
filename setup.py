"""What pyproject.toml cannot say: the wheel carries the CUDA sources, and the library where it has been made.

Installing never needs a compiler: without nvcc the kernels are compiled by NVRTC when they are first used on a GPU.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent


class BuildWithKernels(build_py):
    """Copies ``kernels/cuda`` into the package, and ``make kernels``' library if it has been made."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "kvkernels"
        for part in ("cuda", "kvkernels/lib"):
            folder = HERE / "kernels" / part
            if folder.is_dir():
                shutil.copytree(folder, package / Path(part).name, dirs_exist_ok=True)


class PlatformWheel(bdist_wheel):
    """With the library in it, a wheel is for this platform; loaded with ctypes, it suits every Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = not (HERE / "kernels" / "kvkernels" / "lib").is_dir()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if platform == "any" else ("py3", "none", platform)


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
