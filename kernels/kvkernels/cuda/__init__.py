"""Our CUDA kernels from Python: the library, its parameters, and what to launch.

Sources in ``kernels/cuda``. The same wrappers drive the fat library, modules that NVRTC compiled, and the CPU emulator.
"""
