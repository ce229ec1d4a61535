"""Python wrappers of the CUDA kernels: library, parameter structs, launch configuration.

The sources are in ``kernels/cuda``. The same wrappers drive the fat library, modules compiled by NVRTC, and the CPU
emulator.
"""
