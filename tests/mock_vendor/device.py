"""A device that is not there: tensors that say they lie on it, and compute in host memory.

`add_device("npu", count=2)` makes torch know such a device in this process. A tensor on it is a
`DeviceTensor` around a host tensor. What a real device refuses is refused here: host and device tensors in
one call, a view of memory as numpy, an operator that the vendor says it lacks. Where a vendor's numbers
follow rules of their own, `operators` and `functions` hold the vendor's bodies, which get and give host
tensors.

The process is the vendor's from then on: torch has no way back. So it is always one made for it (process.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

aten = torch.ops.aten


def summed_in_float32(operator: Any) -> Callable[..., Tensor]:
    """A convolution as devices sum it; a host takes ten times as long in float16."""

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any) -> Tensor:
        full = None if bias is None else bias.float()
        return operator(x.float(), weight.float(), full, *rest).to(x.dtype)

    return convolve


BODIES: Mapping[Any, Callable[..., Any]] = {
    operator: summed_in_float32(operator)
    for operator in (aten.convolution.default, aten.conv2d.default, aten.conv3d.default)
}
MOVES = ("copy_", "_to_copy", "to")
MAY_INDEX_FROM_HOST = ("_get_item", "_set_item", "index", "index_put_", "_index_put_impl_")
WAITS = (
    "item",
    "_local_scalar_dense",
    "is_nonzero",
    "tolist",
    "nonzero",
    "equal",
)  # for the device to be done

PINS = (aten.pin_memory.default, aten._pin_memory.default)
PINNED: set[int] = set()  # storages of page-locked host memory


@dataclass
class Allocations:
    """Bytes of live tensors on one device."""

    total: int
    live: int = 0
    peak: int = 0

    def take(self, nbytes: int) -> None:
        if self.live + nbytes > self.total:
            raise torch.OutOfMemoryError(f"mock device: {nbytes} bytes wanted, {self.total - self.live} free")
        self.live += nbytes
        self.peak = max(self.peak, self.live)


class _Block:
    """The memory behind tensors that share a storage; what it holds is free again when the last one goes."""

    def __init__(self, allocations: Allocations, nbytes: int) -> None:
        self._allocations = allocations
        self._nbytes = 0  # until it is taken
        allocations.take(nbytes)
        self._nbytes = nbytes

    def __del__(self) -> None:
        self._allocations.live -= self._nbytes


@dataclass
class Kind:
    """One kind of device. lacks: operators that it has no kernel for, by name ("_scaled_mm").

    no_dtypes: element types that it cannot hold.
    """

    name: str
    memory: list[Allocations]
    operators: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)
    functions: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)
    lacks: frozenset[str] = frozenset()
    no_dtypes: frozenset[torch.dtype] = frozenset()
    blocks: WeakValueDictionary[tuple[int, int], _Block] = field(default_factory=WeakValueDictionary)
    current: int = 0
    dead: str | None = None  # why the device answers nothing any more


KINDS: dict[str, Kind] = {}
STATE = threading.local()  # stream: a side stream that is current here; tape: a capture that is going on


class DeviceTensor(Tensor):
    """A tensor of a mocked device. torch's C++ side sees one without storage; `host` holds the numbers."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor, device: torch.device) -> DeviceTensor:
        # "meta" for C++, which would otherwise look for the driver of a device that it was built without.
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device="meta",
        )
        made.host = host
        made._where = device
        made._block = _block_of(host, device)
        return made

    device = property(lambda self: self._where)
    is_cpu = property(lambda self: False)
    is_meta = property(lambda self: False)
    is_cuda = property(lambda self: self._where.type == "cuda")
    is_xpu = property(lambda self: self._where.type == "xpu")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{self.host!r} on {self.device}"

    def tolist(self) -> Any:
        return run(Tensor.tolist, (self,), {})

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy; use Tensor.cpu() first")

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def record_stream(self, stream: object) -> None:
        pass

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.where:  # C++ would put a number on "meta", from where it does not come back
            args = tuple(torch.tensor(a) if isinstance(a, float | int) else a for a in args)
        if function is torch._has_compatible_shallow_copy_type:  # asked by Module.to
            return False
        # C++ would make tensors of numbers and lists here, beside one that has no storage.
        if function is Tensor.__getitem__:
            return run(_get_item, args, {})
        if function is Tensor.__setitem__:
            return run(_set_item, args, {})
        for kind in KINDS.values():
            if function in kind.functions:
                return run(kind.functions[function], args, dict(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})


def _get_item(tensor: Tensor, index: Any) -> Tensor:
    return tensor[index]


def _set_item(tensor: Tensor, index: Any, value: Any) -> None:
    tensor[index] = value


def _block_of(host: Tensor, device: torch.device) -> _Block:
    kind, storage = KINDS[device.type], host.untyped_storage()
    key = (device.index, storage._cdata)
    block = kind.blocks.get(key)
    if block is None:
        block = kind.blocks[key] = _Block(kind.memory[device.index], storage.nbytes())
    return block


class _Everywhere(TorchDispatchMode):
    """Sees operators without a tensor of the device too: those that make one."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and skipping would import the compiler: two seconds of every process."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})


def run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an operator or a vendor's body on host tensors; tensors that come back lie where they should."""
    seen = [t for t in _tensors_in((*args, *kwargs.values())) if isinstance(t, DeviceTensor)]
    given = seen[0].device if seen else None
    target = given
    moves = name_of(function) in MOVES
    if moves and isinstance(args[0], Tensor):
        target = args[0].device if args[0].device.type in KINDS else None
    for wanted in _devices_named(args, kwargs):
        if wanted.type in KINDS:
            target = _indexed(wanted)
        elif not (wanted.type == "meta" and seen):  # C++ says "meta" where it means the device of its inputs
            target = None
    if moves and len(args) > 1 and isinstance(args[1], Tensor) and name_of(function) == "to":
        target = args[1].device if isinstance(args[1], DeviceTensor) else None
    if given is None and target is None:
        return _on_host(function, args, kwargs)
    kind = KINDS[(given or target).type]  # type: ignore[union-attr]
    _refuse(kind, function, args, seen)
    body = kind.operators.get(function, BODIES.get(function, function))
    host_args, host_kwargs = _on_the_host(args), _on_the_host(kwargs)
    host_kwargs.pop("pin_memory", None)
    # Wrappers of inference tensors cannot be viewed by torch's C++ side, so no tensor here is one.
    with torch.inference_mode(False), torch.no_grad():
        return _carry_out(kind, function, body, host_args, host_kwargs, args, target)


# An operator's arguments are numbers, tensors, and tuples, lists and dicts of them. torch's own pytrees know
# much more, and would take half of the time of every process on a mocked machine.
def _tensors_in(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += _tensors_in(value)
        elif isinstance(value, dict):
            found += _tensors_in(value.values())
    return found


def _on_the_host(value: Any) -> Any:
    """Arguments with what stands for them on the host."""
    if type(value) in (tuple, list):
        return type(value)([_on_the_host(item) for item in value])
    if type(value) is dict:
        return {key: _on_the_host(item) for key, item in value.items()}
    return _on_this_side(value)


def _devices_named(args: Any, kwargs: Any) -> list[torch.device]:
    """Devices among the arguments: under `device`, or, in operators such as aten::to.device, by position."""
    named = kwargs.get("device")
    found = [torch.device(named)] if named is not None else []
    return found + [leaf for leaf in args if isinstance(leaf, torch.device)]


def _on_this_side(value: Any) -> Any:
    """What stands for an argument on the host."""
    if isinstance(value, torch.device) and value.type in (*KINDS, "meta"):
        return torch.device("cpu")
    return value.host if isinstance(value, DeviceTensor) else value


def name_of(function: Any) -> str:
    """The name of an operator or of a vendor's body."""
    return getattr(function, "_opname", getattr(function, "__name__", ""))


def _on_host(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A call among host tensors; memory of this machine can be page-locked, which a CPU build refuses."""
    if function is aten.is_pinned.default:
        return args[0].untyped_storage()._cdata in PINNED
    if function in PINS:
        locked = args[0] if args[0].untyped_storage()._cdata in PINNED else args[0].clone()
    elif kwargs.get("pin_memory"):
        locked = function(*args, **kwargs | {"pin_memory": False})
    else:
        return function(*args, **kwargs)
    PINNED.add(locked.untyped_storage()._cdata)
    return locked


def _carry_out(
    kind: Kind,
    function: Any,
    body: Callable[..., Any],
    host_args: Any,
    host_kwargs: Any,
    args: Any,
    target: torch.device | None,
) -> Any:
    stream, tape = getattr(STATE, "stream", None), getattr(STATE, "tape", None)
    if stream is not None and tape is None:
        late = host_kwargs.get("non_blocking", host_args[2] if len(host_args) > 2 else False)
        if function is aten.copy_.default and target is not None and late:
            stream.put(host_args[0], host_args[1])  # it arrives when somebody waits for it
            return args[0]
        stream.finish()
    if tape is not None:
        tape.forbid(function, leaves=target is None)
    result = body(*host_args, **host_kwargs)
    if tape is not None:
        tape.add(body, host_args, host_kwargs, result)
    tensors = _tensors_in(args)
    inputs = {id(_on_this_side(t)): t for t in tensors}
    this_side, other_side = (
        {
            _on_this_side(t).untyped_storage()._cdata
            for t in tensors
            if isinstance(t, DeviceTensor) == on_device
        }
        for on_device in (True, False)
    )

    def finished(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        known = inputs.get(id(value))  # in place: the tensor itself comes back
        if (
            known is not None
            and known.shape == value.shape
            and isinstance(known, DeviceTensor) == bool(target)
        ):
            return known
        if target is None:  # two memories never share a storage
            return value.clone() if value.untyped_storage()._cdata in this_side else value
        if value.dtype in kind.no_dtypes:
            raise TypeError(f"{kind.name}: the device has no {value.dtype}")
        shared = value.untyped_storage()._cdata in other_side
        return DeviceTensor(value.clone() if shared else value, target)

    return finished(result) if isinstance(result, Tensor) else tree_map(finished, result)


def _refuse(kind: Kind, function: Any, args: Any, seen: list[DeviceTensor]) -> None:
    if kind.dead is not None:
        raise RuntimeError(f"{kind.name}: {kind.dead}")
    name = name_of(function)
    if name in kind.lacks:
        raise NotImplementedError(f"Could not run 'aten::{name}' with arguments from the {kind.name} backend")
    places = {t.device for t in seen}
    if len(places) > 1 and name not in MOVES:
        raise RuntimeError(f"Expected all tensors to be on the same device, found {places}")
    if name in MOVES or name in MAY_INDEX_FROM_HOST or not seen:
        return
    for leaf in _tensors_in(args):
        if not isinstance(leaf, DeviceTensor) and leaf.dim() > 0:
            raise RuntimeError(
                f"Expected all tensors to be on the same device: {name} got one on {seen[0].device} and one "
                f"of {list(leaf.shape)} on the host"
            )


def _indexed(device: torch.device) -> torch.device:
    kind = KINDS[device.type]
    index = kind.current if device.index is None else device.index
    if not 0 <= index < len(kind.memory):
        raise RuntimeError(f"{kind.name}: invalid device ordinal {index} of {len(kind.memory)}")
    return torch.device(device.type, index)


def add_device(
    name: str,
    *,
    count: int = 1,
    total_bytes: int = 4 << 30,
    operators: Mapping[Any, Callable[..., Any]] | None = None,
    functions: Mapping[Any, Callable[..., Any]] | None = None,
    lacks: frozenset[str] = frozenset(),
    no_dtypes: frozenset[torch.dtype] = frozenset(),
) -> Kind:
    """Makes torch know a device of that name in this process, in all its threads.

    A name that torch does not build in takes the place of PrivateUse1, which is free once in a process.
    """
    kind = Kind(
        name,
        [Allocations(total_bytes) for _ in range(count)],
        operators or {},
        functions or {},
        lacks,
        no_dtypes,
    )
    if name not in ("cuda", "xpu"):
        torch.utils.rename_privateuse1_backend(name)
    KINDS[name] = kind
    if len(KINDS) == 1:
        _make_factories_see_it()
        _enter_in_every_thread()
    return kind


def device_module(kind: Kind) -> dict[str, Any]:
    """What torch.cuda, torch.xpu, torch.npu, torch.musa have in common, for this device."""

    def index_of(device: Any = None) -> int:
        if device is None:
            return kind.current
        return device if isinstance(device, int) else _indexed(torch.device(device)).index

    def set_device(device: Any) -> None:
        kind.current = _indexed(torch.device(kind.name, index_of(device))).index

    def reset_peak(device: Any = None) -> None:
        at = kind.memory[index_of(device)]
        at.peak = at.live

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        at = kind.memory[index_of(device)]
        return at.total - at.live, at.total

    return {
        "is_available": lambda: True,
        "device_count": lambda: len(kind.memory),
        "current_device": lambda: kind.current,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "set_device": set_device,
        "mem_get_info": mem_get_info,
        "memory_allocated": lambda device=None: kind.memory[index_of(device)].live,
        "memory_reserved": lambda device=None: kind.memory[index_of(device)].live,
        "max_memory_allocated": lambda device=None: kind.memory[index_of(device)].peak,
        "max_memory_reserved": lambda device=None: kind.memory[index_of(device)].peak,
        "reset_peak_memory_stats": reset_peak,
        "empty_cache": lambda: None,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "device": _current_device_context(kind),
    }


def _current_device_context(kind: Kind) -> type:
    class Context:
        def __init__(self, device: Any) -> None:
            self._index = device if isinstance(device, int) else _indexed(torch.device(device)).index

        def __enter__(self) -> None:
            self._before, kind.current = kind.current, self._index

        def __exit__(self, *error: object) -> None:
            kind.current = self._before

    return Context


def put_into(module: ModuleType, names: Mapping[str, Any]) -> None:
    for name, value in names.items():
        setattr(module, name, value)


def _make_factories_see_it() -> None:
    """torch.tensor and torch.as_tensor fill memory in C++, before any operator is called."""
    for name in ("tensor", "as_tensor"):
        original = getattr(torch, name)

        def made(data: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Tensor:
            device = kwargs.get("device")
            if device is None or torch.device(device).type not in KINDS:
                return _original(data, *args, **kwargs)
            found: Tensor = _original(data, *args, **kwargs | {"device": "cpu"})
            return found.to(device)

        setattr(torch, name, made)


def _enter_in_every_thread() -> None:
    """Modes belong to a thread, and the engine draws in one of its own."""
    _Everywhere().__enter__()
    original = threading.Thread.run

    def run_in_mode(self: threading.Thread) -> None:
        with _Everywhere():
            original(self)

    threading.Thread.run = run_in_mode  # type: ignore[method-assign]
