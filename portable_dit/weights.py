"""Weights: safetensors from disk into a module on the meta device, one tensor at a time.

Names, shapes and dtypes are compared before a byte of a tensor is read, and everything that is missing,
unexpected or mismatched is told in one message. Then tensors stream in the order of the files: worker
threads read ahead and look for NaN, this thread converts, places and lets go.

Letters: N out features, K in features.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from portable_dit.errors import WeightsError
from portable_dit.manifest import MANIFEST, file_problem, read_manifest
from portable_dit.safetensors_file import StoredTensor, listed, stored_tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from portable_dit.models.spec import TensorSource
    from portable_dit.quantize import QuantizedLinear

SCALE_SUFFIX = "_scale"
READ_AHEAD = 4
SMALL_BYTES = 1 << 30  # up to this much is hashed at every load; more is for `weights verify`


@dataclass(frozen=True)
class Checkpoint:
    """A folder with one folder per component; nothing of it is read until asked for."""

    folder: Path

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """The checkpoint in a folder, hashed against its manifest when that is a matter of milliseconds."""
        root = Path(folder)
        if not root.is_dir():
            raise WeightsError(f"{root}: no such folder. Name the folder that holds model_index.json.")
        manifest = read_manifest(root)
        if manifest and sum(entry.bytes for entry in manifest.values()) <= SMALL_BYTES:
            found = (file_problem(root, name, entry) for name, entry in manifest.items())
            if problems := [problem for problem in found if problem]:
                raise WeightsError(listed(f"{root}: not the files that its {MANIFEST} describes.", problems))
        return cls(root)

    def tensors(self, component: str) -> Mapping[str, StoredTensor]:
        """All tensors of a component's folder by name. Raises WeightsError for missing or damaged files."""
        return stored_tensors(self.folder / component)


def load_component(
    module: nn.Module,
    stored: Mapping[str, StoredTensor],
    *,
    sources: Mapping[str, TensorSource],
    device: Callable[[str], str],
    unused: Collection[str] = (),
    title: str = "weights",
) -> int:
    """Fills parameters, persistent buffers and quantised layers of a meta module; gives the bytes read.

    sources: for each name of the module, what it is made of. device: where each name goes. unused: stored
    names without a use.
    The module's parameters say the target dtype and shape. An 8-bit weight with a `_scale` beside it is
    expanded to float32 first, the master from which every precision is made.
    """
    targets = _targets(module)
    made = {name: _Made(name, stored, source) for name, source in sources.items()}
    _compare(made, targets, stored, unused, title)
    total = 0
    for source in _read_ahead([made[name] for name in targets]):
        target = targets[source.name]
        tensor = source.read(target.shape)
        if isinstance(target, _Slot):
            target.fill(tensor.to(device=device(source.name), dtype=target.dtype, copy=True))
        else:
            target.accept_weight(tensor.to(device=device(source.name), copy=True))
        total += source.nbytes
        del tensor
        source.release()
    return total


def fill_random(module: nn.Module, *, device: Callable[[str], str], seed: int = 0) -> None:
    """Right shapes without meaning, for trying a layout before the weights are there.

    Matrices are normal with variance 1 / K, so activations keep their scale; vectors are ones or zeros. Drawn
    on each device by its own generator, so other devices get other numbers: nothing depends on them.
    """
    import torch

    generators: dict[str, torch.Generator] = {}
    for name, target in _targets(module).items():
        place, shape, dtype = device(name), target.shape, target.dtype
        if place not in generators:
            generators[place] = torch.Generator(place).manual_seed(seed)
        if len(shape) > 1 and dtype.is_floating_point:
            tensor = torch.empty(shape, dtype=torch.float32, device=place)
            tensor.normal_(0.0, shape[-1] ** -0.5, generator=generators[place])
        else:
            tensor = torch.full(shape, float(not name.endswith("bias")), device=place)
        if isinstance(target, _Slot):
            target.fill(tensor.to(dtype))
        else:
            target.accept_weight(tensor)


@dataclass(frozen=True, eq=False)
class _Slot:
    """A parameter or buffer of a module that waits for its tensor."""

    owner: nn.Module
    leaf: str
    meta: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.meta.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.meta.dtype

    def fill(self, tensor: Tensor) -> None:
        from torch import nn

        is_parameter = isinstance(self.meta, nn.Parameter)
        setattr(self.owner, self.leaf, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)


@dataclass(frozen=True, eq=False)
class _QuantizedSlot:
    """The weight of a quantised layer, which the layer encodes as it comes."""

    layer: QuantizedLinear

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layer.out_features, self.layer.in_features

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.dtype

    def accept_weight(self, weight: Tensor) -> None:
        self.layer.accept_weight(weight)


def _targets(module: nn.Module) -> dict[str, _Slot | _QuantizedSlot]:
    from portable_dit.quantize import QuantizedLinear

    targets: dict[str, _Slot | _QuantizedSlot] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        path, _, leaf = name.rpartition(".")
        targets[name] = _Slot(module.get_submodule(path), leaf, tensor)
    for path, layer in module.named_modules():
        if isinstance(layer, QuantizedLinear):
            targets[f"{path}.weight"] = _QuantizedSlot(layer)
    return targets


@dataclass(frozen=True, eq=False)
class _Made:
    """One parameter of the module and the stored tensors that it is made of."""

    name: str
    stored: Mapping[str, StoredTensor]
    source: TensorSource

    @property
    def parts(self) -> list[StoredTensor]:
        return [self.stored[name] for name in self.source.names]

    @property
    def nbytes(self) -> int:
        return sum(part.stop - part.start for part in self.parts)

    def is_finite(self) -> bool:
        scales = [scale for name in self.source.names if (scale := _scale_of(name, self.stored))]
        return all(part.is_finite() for part in (*self.parts, *scales))

    def read(self, shape: tuple[int, ...]) -> Tensor:
        """The tensor on the host: float32 where it had to be expanded, else often a view of the file."""
        try:
            tensor: Tensor = self.source.make(*(_expanded(name, self.stored) for name in self.source.names))
        except RuntimeError as error:
            raise WeightsError(f"{self.name}: cannot be made of {self.describe()} ({error}).") from error
        if tuple(tensor.shape) != shape:
            raise WeightsError(f"{self.name}: {self.describe()} stored, {list(shape)} expected.")
        return tensor

    def on_meta(self) -> Tensor | None:
        """The shape and dtype that `read` will give; None when that depends on the values."""
        import torch

        inputs = []
        for part in self.parts:
            expanded = _scale_of(part.name, self.stored) is not None
            dtype = torch.float32 if expanded else _torch_dtype(part.dtype)
            inputs.append(torch.empty(part.shape, dtype=dtype, device="meta"))
        try:
            tensor: Tensor = self.source.make(*inputs)
        except RuntimeError:
            return None
        return tensor

    def release(self) -> None:
        for part in self.parts:
            part.release()

    def describe(self) -> str:
        return " and ".join(f"{part.name} {part.dtype} {list(part.shape)}" for part in self.parts)


def _scale_of(name: str, stored: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """The scale beside an 8-bit tensor."""
    return stored.get(name + SCALE_SUFFIX) if stored[name].dtype in ("I8", "F8_E4M3", "F8_E5M2") else None


def _expanded(name: str, stored: Mapping[str, StoredTensor]) -> Tensor:
    """A stored tensor as it is, or values times scales in float32."""
    values, scale = _as_tensor(stored[name]), _scale_of(name, stored)
    if scale is None:
        return values
    return values.float() * _as_tensor(scale).float().reshape(
        -1, *[1] * (values.dim() - 1)
    )  # [N, 1] or [1, 1]


def _as_tensor(stored: StoredTensor) -> Tensor:
    """A view of the mapped file, or a copy where the file is not aligned to the dtype."""
    import torch

    dtype = _torch_dtype(stored.dtype)
    count = (stored.stop - stored.start) // dtype.itemsize
    if count == 0:
        return torch.empty(stored.shape, dtype=dtype)
    if stored.start % dtype.itemsize:
        copied = bytearray(stored.mapped[stored.start : stored.stop])
        return torch.frombuffer(copied, dtype=dtype).view(stored.shape)
    return torch.frombuffer(stored.mapped, dtype=dtype, count=count, offset=stored.start).view(stored.shape)


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    named = {
        "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16",
        "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    }  # fmt: skip
    dtype: torch.dtype = getattr(torch, named[name])
    return dtype


def _compare(
    made: Mapping[str, _Made],
    targets: Mapping[str, _Slot | _QuantizedSlot],
    stored: Mapping[str, StoredTensor],
    unused: Collection[str],
    title: str,
) -> None:
    """Raises WeightsError that lists everything by which a checkpoint differs from its module."""
    wanted = {name: m for name, m in made.items() if name in targets}
    used = {name for m in wanted.values() for name in m.source.names}
    scales = {name + SCALE_SUFFIX for name in used if name in stored and _scale_of(name, stored)}
    absent = {name: [part for part in m.source.names if part not in stored] for name, m in wanted.items()}
    problems = {
        "missing": [name for name in targets if name not in made or absent[name]],
        "unexpected": sorted(stored.keys() - used - scales - set(unused)),
        "mismatched": [
            problem
            for name, m in wanted.items()
            if not absent[name] and (problem := _mismatch(m, targets[name], stored))
        ],
    }
    parts = [listed(f"{len(names)} {kind}:", names) for kind, names in problems.items() if names]
    if parts:
        raise WeightsError(
            f"{title}: the checkpoint does not fit the model that its config describes.\n"
            + "\n".join(parts)
            + "\nUse the config.json and the weights of one and the same checkpoint."
        )


def _mismatch(made: _Made, target: _Slot | _QuantizedSlot, stored: Mapping[str, StoredTensor]) -> str | None:
    for part in made.parts:
        scale, rows = _scale_of(part.name, stored), part.shape[:1]
        if scale is not None and scale.shape not in ((), (1,), rows, (*rows, 1)):
            return f"{scale.name}: {list(scale.shape)} stored, {list(rows)} expected"
    meta = made.on_meta()
    if meta is None:
        return None  # told when it is read
    if tuple(meta.shape) != target.shape:
        return f"{made.name}: {made.describe()} stored, {list(target.shape)} expected"
    if meta.dtype.is_floating_point != target.dtype.is_floating_point:
        return f"{made.name}: {made.describe()} stored, {str(target.dtype).removeprefix('torch.')} expected"
    return None


def _read_ahead(sources: list[_Made]) -> Iterator[_Made]:
    """Sources in file order, each read and found finite by a worker thread a few tensors earlier."""
    order = sorted(sources, key=lambda made: (str(made.parts[0].path), made.parts[0].start))
    with ThreadPoolExecutor(2, thread_name_prefix="weights") as pool:
        ahead: list[Future[bool]] = []
        for place, source in enumerate(order):
            while len(ahead) < min(place + READ_AHEAD, len(order)):
                ahead.append(pool.submit(order[len(ahead)].is_finite))
            if not ahead[place].result():
                bad = [source.name, *(later.name for later in order[place + 1 :] if not later.is_finite())]
                raise WeightsError(
                    listed(f"{source.parts[0].path}: {len(bad)} tensors hold NaN or infinite values:", bad)
                    + "\nSuch weights draw noise. Download them again, or export them without overflow."
                )
            yield source
