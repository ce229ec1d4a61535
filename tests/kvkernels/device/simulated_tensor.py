"""Tensors of a simulated device, on which torch's operations run as work of the current stream.

The device is PyTorch's PrivateUse1 with kernels in Python. A tensor wraps host memory that belongs to the device. Each
operation is checked and timed as a kernel that reads and writes its arguments. The operation runs when it is called,
after the work for which its stream would wait, because its result must have a shape. The clocks still treat it as
asynchronous.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from kvkernels.device.visible_devices import add_device_type
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

from tests.kvkernels.device.access_order import call_site
from tests.kvkernels.device.device_fault import WrongDevice
from tests.kvkernels.device.simulated_device import SimulatedDevice, Use, use_of

NAME = "sim"
# Operations that return a value to the host.
_WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")
# Operations that torch composes from the device's other operations.
_WHOLE = ("scaled_dot_product_attention",)
# Operations that torch has on GPUs only.
_GPU_ONLY = {torch.ops.aten.mm.dtype: lambda a, b, dtype: a.to(dtype) @ b.to(dtype)}
_devices: dict[int, SimulatedDevice] = {}


class SimulatedTensor(torch.Tensor):
    """A tensor on a simulated device. ``raw`` is its memory as a CPU tensor."""

    raw: Tensor
    owner: SimulatedDevice

    @staticmethod
    def __new__(cls, raw: Tensor, owner: SimulatedDevice) -> SimulatedTensor:
        with torch.inference_mode(False):  # views of tensors that were made before inference mode
            made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                raw.shape,
                strides=raw.stride(),
                storage_offset=raw.storage_offset(),
                dtype=raw.dtype,
                device=owner.torch,
            )
        made.raw, made.owner = raw, owner
        return made  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SimulatedTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        """Return the elements. torch's own method refuses tensor classes of Python."""
        return self.cpu().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy. torch's own method copies a storage, which this class does not have."""
        return memo.setdefault(id(self), self.clone())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatched(func, args, kwargs or {})


def add_simulated_device(device: SimulatedDevice) -> None:
    """Make a device available as ``sim:N``, to torch and to the device interface."""
    _backend()
    _devices[device.index] = device
    device.torch = torch.device(NAME, device.index)
    device.wrap = lambda memory: SimulatedTensor(memory, device)
    add_device_type(NAME, lambda wanted: _devices[wanted.index or 0])


def _dispatched(func: Any, args: Any, kwargs: Any) -> Any:
    name = func._schema.name.removeprefix("aten::")
    leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, SimulatedTensor)]
    owner = leaves[0].owner
    if any(x.owner is not owner for x in leaves):
        raise WrongDevice(f"{name} with tensors of {', '.join(sorted({str(x.device) for x in leaves}))}")
    if name not in _WHOLE and (made := func.decompose(*args, **kwargs)) is not NotImplemented:
        return made  # in inference mode, operations arrive here before torch divides them
    if name == "_to_copy":
        return _converted(args[0], kwargs)
    if name == "copy_" and args[0].device != args[1].device:
        return _transferred(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if kwargs.get("device") is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    raw_args, raw_kwargs = tree_map(_raw, (args, kwargs))
    if name in _WAITING:
        owner.current_stream().synchronize()
        owner.check_read(what := f"{name} at {call_site()}", [use_of(x.raw, False) for x in leaves])
        found = func(*raw_args, **raw_kwargs)
        return tree_map(lambda x: _moved(x, owner, what) if isinstance(x, Tensor) else x, found)
    returns = func._schema.returns
    if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
        return tree_map(
            lambda x: SimulatedTensor(x, owner) if isinstance(x, Tensor) else x, func(*raw_args, **raw_kwargs)
        )
    return _computed(owner, func, name, (args, kwargs), (raw_args, raw_kwargs), leaves)


def _computed(owner: SimulatedDevice, func: Any, name: str, given: Any, raw: Any, leaves: list[SimulatedTensor]) -> Any:
    """Run an operation as a kernel of the current stream."""
    written = {id(x) for x in _written(func, *given) if isinstance(x, SimulatedTensor)}
    uses = [use_of(x.raw, id(x) in written) for x in leaves if x.raw.numel()]
    what = f"{name} at {call_site()}"
    own = {id(x.raw): x for x in leaves}
    results: list[tuple[Tensor, bool]] = []  # memory, and whether the operation has allocated it

    def run() -> Any:
        return _GPU_ONLY.get(func, func)(*raw[0], **raw[1])

    def placed(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) in own:
            return own[id(x)]
        if any(x.untyped_storage().data_ptr() == y.raw.untyped_storage().data_ptr() for y in leaves):
            results.append((x, False))
            return SimulatedTensor(x, owner)
        target = _allocated(owner, x)
        results.append((target, True))
        return SimulatedTensor(target, owner)

    def again() -> None:
        made = [x for x in tree_leaves(run()) if isinstance(x, Tensor) and id(x) not in own]
        for value, (target, ours) in zip(made, results, strict=True):
            if ours:
                target.copy_(value)

    return owner.compute(what, uses, _flops(name, leaves), run, placed, lambda: _uses_of(results), again)


def _uses_of(results: list[tuple[Tensor, bool]]) -> list[Use]:
    return [use_of(target, True) for target, ours in results if ours and target.numel()]


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operation changes."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[i] if i < len(args) else None)
            found += tree_leaves(value)
    return found


def _allocated(owner: SimulatedDevice, like: Tensor) -> Tensor:
    """Copy a CPU result into new device memory; keep its strides if they are dense."""
    shape = torch.empty_like(like, device="meta")
    target = (
        owner.allocate_raw(shape.untyped_storage().nbytes()).view(like.dtype).as_strided(like.shape, shape.stride())
    )
    return target.copy_(like)


def _moved(x: Tensor, owner: SimulatedDevice, what: str) -> SimulatedTensor:
    target = _allocated(owner, x)
    owner.compute(
        what, [use_of(target, True)] if target.numel() else [], 0.0, lambda: None, lambda x: x, list, lambda: None
    )
    return SimulatedTensor(target, owner)


def _converted(x: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Convert a device tensor to another dtype or place."""
    assert isinstance(x, SimulatedTensor)
    device, dtype = torch.device(kwargs.get("device") or x.device), kwargs.get("dtype") or x.dtype
    if device == x.device or (device.type == x.device.type and device.index is None):
        out = torch.empty_like(x, dtype=dtype, memory_format=kwargs.get("memory_format") or torch.preserve_format)
        return out.copy_(x)
    if device.type != "cpu":
        raise WrongDevice(f"a tensor of {x.device} is copied to {device}")
    made = torch.empty_like(x.raw).copy_(_read(x))
    return made.to(dtype)


def _read(x: SimulatedTensor) -> Tensor:
    """Wait for a tensor's device; return the memory, which the host may then read."""
    x.owner.current_stream().synchronize()
    if x.raw.numel():
        x.owner.check_read(f"a copy to the host at {call_site()}", [use_of(x.raw, False)])
    return x.raw


def _transferred(target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    """Copy between host and device. A copy from pinned memory is asynchronous; for any other copy, the host waits."""
    if not isinstance(target, SimulatedTensor):
        assert isinstance(source, SimulatedTensor)
        return target.copy_(_read(source))
    if isinstance(source, SimulatedTensor):
        raise WrongDevice(f"a tensor of {source.device} is copied to {target.device}")
    owner, plain = target.owner, source.to(target.dtype)
    if owner.is_pinned(source) and non_blocking and target.dtype == source.dtype:
        owner.current_stream().copy(target.raw, source)
    elif target.numel():
        use, raw = use_of(target.raw, True), target.raw
        what = f"a copy from the host at {call_site()}"
        owner.clock.num_host_waits += 1
        owner.check_call(what, waits=True)
        owner.compute(what, [use], 0.0, lambda: raw.copy_(plain), lambda x: None, list, lambda: None)
    return target


def _raw(x: Any) -> Any:
    if isinstance(x, SimulatedTensor):
        return x.raw
    return x


def _flops(name: str, leaves: list[SimulatedTensor]) -> float:
    """Return the number of operations of a matrix product, which may take longer than its memory traffic."""
    shapes = [x.shape for x in leaves if x.dim() >= 2]
    if name in ("mm", "addmm", "bmm", "baddbmm") and len(shapes) >= 2:
        return 2.0 * shapes[-2].numel() * shapes[-1][-1]
    return 0.0


class _Module:
    """The module ``torch.sim``, which torch needs for a device."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return len(_devices)

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        return

    def get_rng_state(self, device: object = None) -> Tensor:
        """Return an empty state, because the device draws no random numbers. torch's operator checks save the state."""
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        return


@cache
def _backend() -> torch.library.Library:
    """Register the device with torch; a process can do this only once."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())  # type: ignore[arg-type]
    library = torch.library.Library("aten", "IMPL")

    def empty(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, **_: Any) -> Tensor:
        strides = torch.empty(size, device="meta").stride()
        return empty_strided(size, strides, dtype, layout, device)

    def empty_strided(
        size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, **_: Any
    ) -> Tensor:
        chosen = dtype or torch.get_default_dtype()
        owner = _devices[0 if device is None or device.index is None else device.index]
        meta = torch.empty_strided(size, stride, dtype=chosen, device="meta")
        memory = owner.allocate_raw(meta.untyped_storage().nbytes())
        return SimulatedTensor(memory.view(chosen).as_strided(size, stride), owner)

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        return _transferred(target, source, non_blocking)

    def arange(*bounds: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return torch.arange(*bounds, dtype=dtype).to(device)

    for overload in ("arange", "arange.start", "arange.start_step"):
        library.impl(overload, arange, "PrivateUse1")  # torch's own would resize device memory
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")  # of torch.tensor, which runs below tensors' classes
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    return library
