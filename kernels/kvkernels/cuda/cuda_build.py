"""Build of the CUDA kernels without a GPU: a fat library with nvcc, and sm_70 with NVRTC.

The library has the architectures that nvcc compiles for. sm_70 needs an NVRTC older than CUDA 13; without one, the
library has no code for sm_70. ``make kernels`` runs ``python -m kvkernels.cuda.cuda_build``. The build needs neither a
driver nor torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvsidecar.process.cpus import usable_cpus

from kvkernels.cuda import cuda_sources, nvrtc

LIBRARY = Path(__file__).parent.parent / "lib" / "libkvkernels.so"
ARCHITECTURES = (75, 80, 86, 89, 90)
VOLTA = 70
# Registers that a change may add to a kernel before the check fails. This number does not change occupancy.
_SLACK_REGISTERS = 8

Report = dict[str, dict[str, dict[str, int]]]


def find_cuobjdump() -> str | None:
    """Find cuobjdump with its disassembler beside it, in the toolkit or in NVIDIA's wheels."""
    folders = [f"{folder}/bin" for folder in nvrtc.nvidia_folders()]
    return next((found for f in folders if (found := shutil.which("cuobjdump", path=f))), shutil.which("cuobjdump"))


def find_nvcc() -> str | None:
    """Find nvcc in CUDA_HOME, in NVIDIA's default location or on the path."""
    places = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    return next((found for p in places if p and (found := shutil.which("nvcc", path=f"{p}/bin"))), shutil.which("nvcc"))


def supported_architectures(nvcc: str) -> tuple[int, ...]:
    """Return the supported architectures that an nvcc compiles for. Raises RuntimeError if there are none."""
    listed = {int(number) for number in re.findall(r"sm_(\d+)\b", _run([nvcc, "--list-gpu-code"]))}
    found = tuple(architecture for architecture in ARCHITECTURES if architecture in listed)
    if not found:
        raise RuntimeError(f"{nvcc} compiles for sm_{', sm_'.join(map(str, sorted(listed)))}, and for none of ours")
    return found


def identity_flags(architectures: tuple[int, ...]) -> list[str]:
    """Return the flags by which ``launch.cu`` knows its sources and architectures."""
    return [
        f"-DKVK_FINGERPRINT={cuda_sources.fingerprint('cuda')}",
        f"-DKVK_ARCHITECTURES={'_'.join(map(str, architectures))}",
    ]


def build(target: Path = LIBRARY, architectures: tuple[int, ...] = (), jobs: int | None = None) -> Report:
    """Compile all sources, link one library, and return each kernel's resource usage.

    Without ``architectures``, it compiles for all supported architectures that nvcc knows. Raises RuntimeError with the
    compiler's message, or without nvcc.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError(
            "no nvcc: install the CUDA toolkit 12 or 13, or set CUDA_HOME. Without one, kernels are compiled by NVRTC "
            "when they are first used on a GPU"
        )
    architectures = architectures or supported_architectures(nvcc)
    cuda = cuda_sources.folder() / "cuda"
    target.parent.mkdir(parents=True, exist_ok=True)
    code = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    # PTX of the newest architecture, for later devices.
    code.append(f"-gencode=arch=compute_{architectures[-1]},code=compute_{architectures[-1]}")
    flags = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC", "-Xptxas", "-v", "--threads", "0", *code]
    flags += identity_flags(architectures)
    with tempfile.TemporaryDirectory() as work:
        units = [(name, "0") for name in (*cuda_sources.KERNELS, "launch.cu") if name not in cuda_sources.PARTS]
        units += [(name, str(part)) for name, count in cuda_sources.PARTS.items() for part in range(count)]
        units.sort(key=lambda unit: unit[0] not in cuda_sources.PARTS)  # the longest first
        objects = [str(Path(work) / f"{name}{part}.o") for name, part in units]
        with ThreadPoolExecutor(jobs or usable_cpus()) as pool:
            commands = [
                [nvcc, *flags, f"-DKVK_PART={part}", "-c", str(cuda / name), "-o", target_object]
                for (name, part), target_object in zip(units, objects, strict=True)
            ]
            logs = list(pool.map(_run, commands))
        linked = str(target) + ".part"
        _run([nvcc, "-shared", "-cudart", "static", *objects, "-o", linked])
    Path(linked).replace(target)
    report = read_resources("\n".join(logs))
    count_products(report, target)
    return report


def _run(command: list[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:1])} failed:\n{done.stderr[-4000:]}")
    return done.stdout + done.stderr


def read_resources(log: str) -> Report:
    """Parse ptxas' log to ``{kernel: {architecture: {registers, spill_bytes, stack_bytes}}}``."""
    report: Report = {}
    kernel = architecture = ""
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '(\w+)' for '(sm_\d+)'", line):
            kernel, architecture = found.groups()
            report.setdefault(kernel, {})[architecture] = {"registers": 0, "spill_bytes": 0, "stack_bytes": 0}
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, stores, loads = map(int, found.groups())
            if kernel:
                report[kernel][architecture] |= {"spill_bytes": stores + loads, "stack_bytes": stack}
        elif (found := re.search(r"Used (\d+) registers", line)) and kernel:
            report[kernel][architecture]["registers"] = int(found.group(1))
    return report


def count_products(report: Report, library: Path) -> None:
    """Add the number of tensor-core instructions to every entry, if there is a disassembler."""
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        print("tensor-core instructions were not counted: pip install 'kvsidecar[kernels]' brings cuobjdump")
        return
    for by_architecture in report.values():
        for entry in by_architecture.values():
            entry["tensor_core_instructions"] = 0
    path = os.pathsep.join([str(Path(cuobjdump).parent), os.environ.get("PATH", "")])
    kernel = architecture = ""
    for line in _run([cuobjdump, "-sass", str(library)], {**os.environ, "PATH": path}).splitlines():
        if found := re.search(r"^\s*arch = (sm_\d+)|Function : (\w+)", line):
            architecture, kernel = found.group(1) or architecture, found.group(2) or kernel
        elif "HMMA" in line and architecture in report.get(kernel, {}):
            report[kernel][architecture]["tensor_core_instructions"] += 1


def growth(old: Report, new: Report) -> list[str]:
    """List regressions, one sentence each: more registers, new spills, tensor cores no longer used."""
    out = []
    for kernel, by_architecture in new.items():
        for architecture, now in by_architecture.items():
            before = old.get(kernel, {}).get(architecture)
            if before is None:
                continue
            where = f"{kernel} on {architecture}"
            if now["registers"] > before["registers"] + _SLACK_REGISTERS:
                out.append(f"{where} uses {now['registers']} registers, before {before['registers']}")
            if now["stack_bytes"] > before["stack_bytes"]:
                out.append(f"{where} has {now['stack_bytes']} bytes of stack, before {before['stack_bytes']}")
            if now["spill_bytes"] > before["spill_bytes"]:
                out.append(f"{where} spills {now['spill_bytes']} bytes, before {before['spill_bytes']}")
            if before.get("tensor_core_instructions") and now.get("tensor_core_instructions") == 0:
                out.append(f"{where} uses no tensor cores any more")
    out += [f"{kernel} is gone" for kernel in old if kernel not in new]
    return out


def _build_locked(target: Path, architectures: tuple[int, ...]) -> Report:
    """Build while no other process builds the same library."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with nvrtc.locked(target.with_suffix(".lock")):
        chosen = tuple(a for a in architectures if a != VOLTA)
        print(f"compiling for {', '.join(f'sm_{a}' for a in chosen) or 'all of nvcc'} ...", flush=True)
        return build(target, chosen)


def _build_volta(target: Path) -> None:
    """Build the cubin of sm_70 if an NVRTC compiles for it; otherwise print a message."""
    try:
        compiler = nvrtc.find_compiler(f"sm_{VOLTA}")
    except RuntimeError as error:
        target.unlink(missing_ok=True)
        print(f"left out sm_{VOLTA}: {error}")
        return
    target.write_bytes(compiler.compile(cuda_sources.program(), f"sm_{VOLTA}"))
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make kernels", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=LIBRARY)
    parser.add_argument("--no-volta", action="store_true", help="leave out sm_70, which needs the NVRTC 12.9 wheel")
    parser.add_argument("--arch", type=int, action="append", help="only this architecture, such as 90; repeatable")
    parser.add_argument("--report", type=Path, help="write each kernel's resource usage to this JSON file")
    parser.add_argument("--check", type=Path, help="fail when a kernel uses more than this JSON file says")
    parser.add_argument("--if-possible", action="store_true", help="exit with 0 if there is no nvcc")
    options = parser.parse_args()
    if options.if_possible and find_nvcc() is None:
        print("skipped: no nvcc to compile the CUDA kernels")
        return 0
    try:
        report = _build_locked(options.out, tuple(options.arch or ()))
        print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB, {len(report)} kernels")
        if not options.no_volta and (not options.arch or VOLTA in options.arch):
            _build_volta(options.out.with_name("kvkernels_sm70.cubin"))
    except (RuntimeError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.report:
        options.report.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    worse = growth(json.loads(options.check.read_text()), report) if options.check else []
    for sentence in worse:
        print(sentence, file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
