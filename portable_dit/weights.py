"""Weights: safetensors from disk into a module on the meta device, one tensor at a time.

Names, shapes and dtypes are compared before a byte of a tensor is read, and everything that is missing,
unexpected or mismatched is told in one message. Then tensors stream in the order of the files: worker
threads read ahead and look for NaN, this thread converts, places and lets go. A weight that is stored in the
very format its layer runs is handed over as it is, since rounding twice would change it.

Letters: N out features, K in features.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from portable_dit.errors import WeightsError
from portable_dit.manifest import MANIFEST, file_problem, read_manifest
from portable_dit.safetensors_file import ITEM_BYTES, StoredTensor, listed, stored_tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from portable_dit.formats import Encoded, Format
    from portable_dit.models.spec import TensorSource
    from portable_dit.quantize import QuantizedLinear
    from portable_dit.weight_cache import CachedWeights

SCALE_SUFFIX = "_scale"
READERS = 4
READ_AHEAD_BYTES = 40 << 20  # waits in memory, or the one next tensor if that is larger
PIECE_BYTES = 8 << 20  # of a tensor, for one reader at a time
MARKER_BYTES = 1 << 16  # a longer row of bytes is no text
SMALL_BYTES = 1 << 30  # up to this much is hashed at every load; more is for `weights verify`


@dataclass(frozen=True)
class Checkpoint:
    """A folder with one folder per component; nothing of it is read until asked for."""

    folder: Path

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """The checkpoint in a folder, hashed against its manifest when that is a matter of milliseconds."""
        root = Path(folder)
        if root.is_file():
            return cls(root.parent)
        if not root.is_dir():
            raise WeightsError(f"{root}: no such folder. Name the folder that holds model_index.json.")
        manifest = read_manifest(root)
        if manifest and sum(entry.bytes for entry in manifest.values()) <= SMALL_BYTES:
            found = (file_problem(root, name, entry) for name, entry in manifest.items())
            if problems := [problem for problem in found if problem]:
                raise WeightsError(listed(f"{root}: not the files that its {MANIFEST} describes.", problems))
        return cls(root)

    def tensors(self, component: str | Path) -> Mapping[str, StoredTensor]:
        """All tensors of a component's folder or file by name.

        component: relative to the checkpoint, or a path of its own. Raises WeightsError for missing or
        damaged files.
        """
        return stored_tensors(self.folder / component)


def marker_texts(stored: Mapping[str, StoredTensor]) -> dict[str, bytes]:
    """The short rows of bytes among stored tensors, by name: how some checkpoints mark quantised layers."""
    return {
        name: tensor.content()
        for name, tensor in stored.items()
        if tensor.dtype == "U8" and len(tensor.shape) == 1 and tensor.nbytes <= MARKER_BYTES
    }


def load_component(
    module: nn.Module,
    stored: Mapping[str, StoredTensor],
    *,
    sources: Mapping[str, TensorSource],
    device: Callable[[str], str],
    unused: Collection[str] = (),
    title: str = "weights",
    share: Callable[[str, Tensor], Tensor] | None = None,
    cache: CachedWeights | None = None,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Fills parameters, persistent buffers and quantised layers of a meta module; gives the bytes read.

    sources: for each name of the module, what it is made of. device: where each name goes. unused: stored
    names without a use. share: this rank's part of each whole tensor, None = all of it. cache: where encoded
    weights are taken from, or put. on_bytes: told the bytes that were placed and how many there are.
    The module's parameters say the target dtype and shape. An 8-bit weight with a `_scale` beside it is
    expanded to float32 first, the master from which every precision is made.
    """
    targets = _targets(module)
    made = {name: _Made(name, stored, source, share) for name, source in sources.items()}
    _compare(made, targets, stored, unused, title)
    cached = cache.tensors if cache is not None else {}
    expected = sum(cached[name].nbytes if name in cached else made[name].nbytes for name in targets)
    done = 0
    for name in [name for name in targets if name in cached]:
        target = targets.pop(name)
        assert cache is not None
        assert isinstance(target, _QuantizedSlot)
        target.layer.accept_encoded(_on(cache.read(name), device(name)))
        cached[name].release()
        done += cached[name].nbytes
        on_bytes(done, expected)
    for source in _read_ahead([made[name] for name in targets]):
        target = targets[source.name]
        place = device(source.name)
        if isinstance(target, _Slot):
            tensor = source.read(target.shape)
            target.fill(tensor.to(device=place, dtype=target.dtype, copy=True))
            del tensor
        else:
            encoded = target.accept(source, place)
            if cache is not None:
                cache.write(source.name, encoded)
            del encoded
        source.release()
        done += source.nbytes
        on_bytes(done, expected)
    return done


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

    def accept(self, source: _Made, place: str) -> Encoded:
        """Takes the weight to the place, encoded there unless it is stored so; gives what was taken."""
        from portable_dit.formats import encode

        form = self.layer.kernel.format
        encoded = source.encoded(form)
        if encoded is None:
            weight = source.read(self.shape).to(device=place, copy=True)
            encoded = encode(weight, form.name)
            del weight
        else:
            encoded = _on(encoded, place)
        self.layer.accept_encoded(encoded)
        return encoded


def _on(encoded: Encoded, place: str) -> Encoded:
    """An encoded weight in memory of its own at the place."""
    from portable_dit.formats import Encoded

    scales = None if encoded.scales is None else encoded.scales.to(device=place, copy=True)
    return Encoded(encoded.format, encoded.values.to(device=place, copy=True), scales)


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
    share: Callable[[str, Tensor], Tensor] | None = None

    @property
    def parts(self) -> list[StoredTensor]:
        return [self.stored[name] for name in self.source.names]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def pieces(self) -> list[Callable[[], bool]]:
        """Calls that read a piece of the stored tensors each, and say whether it is finite."""
        scales = [scale for name in self.source.names if (scale := _scale_of(name, self.stored))]
        return [
            partial(part.is_finite, first, first + PIECE_BYTES)
            for part in (*self.parts, *scales)
            for first in range(0, part.nbytes, PIECE_BYTES)
        ]

    def is_finite(self) -> bool:
        return all(piece() for piece in self.pieces())

    def read(self, shape: tuple[int, ...]) -> Tensor:
        """The tensor on the host: float32 where it had to be expanded, else often a view of the file."""
        try:
            tensor: Tensor = self.source.make(*(_expanded(name, self.stored) for name in self.source.names))
        except RuntimeError as error:
            raise WeightsError(f"{self.name}: cannot be made of {self.describe()} ({error}).") from error
        if self.share is not None:
            tensor = self.share(self.name, tensor)
        if tuple(tensor.shape) != shape:
            raise WeightsError(f"{self.name}: {self.describe()} stored, {list(shape)} expected.")
        return tensor

    def encoded(self, form: Format) -> Encoded | None:
        """The weight as it is stored, when that is the format already; None when it must be encoded."""
        import torch

        from portable_dit.formats import WHOLE, Encoded

        scales = [_scale_of(name, self.stored) for name in self.source.names]
        rows = [part.shape[0] if part.shape else 0 for part in self.parts]
        if self.share is not None or not self.source.by_rows or form.scales is not torch.float32:
            return None
        if form.block[1] != WHOLE or any(_torch_dtype(part.dtype) is not form.values for part in self.parts):
            return None
        spread = [
            as_tensor(scale).float().reshape(-1, 1).expand(count, 1)
            for scale, count in zip(scales, rows, strict=True)
            if scale is not None
        ]
        if len(spread) != len(rows):
            return None
        values = self.source.make(*(as_tensor(part) for part in self.parts))
        each = self.source.make(*spread).contiguous()  # [N, 1]
        if form.block[0] == WHOLE:
            if bool((each != each[0]).any()):
                return None
            each = each[:1]
        elif form.block[0] != 1:
            return None
        return Encoded(form, values, each)

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
            return tensor if self.share is None else self.share(self.name, tensor)
        except RuntimeError:
            return None

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
    values, scale = as_tensor(stored[name]), _scale_of(name, stored)
    if scale is None:
        return values.float() if stored[name].dtype.startswith("F8") else values
    return values.float() * as_tensor(scale).float().reshape(
        -1, *[1] * (values.dim() - 1)
    )  # [N, 1] or [1, 1]


def as_tensor(stored: StoredTensor) -> Tensor:
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


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order."""
    import torch

    return memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def safetensors_dtype(dtype: torch.dtype) -> str:
    """safetensors' name of a dtype."""
    return next(name for name in ITEM_BYTES if _torch_dtype(name) is dtype)


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
    """Sources in file order, each read and found finite by worker threads while earlier ones are placed."""
    order = sorted(sources, key=lambda made: (str(made.parts[0].path), made.parts[0].start))
    waiting: deque[list[Future[bool]]] = deque()
    ahead, ahead_bytes = 0, 0
    with ThreadPoolExecutor(READERS, thread_name_prefix="weights") as pool:
        for place, source in enumerate(order):
            while ahead < len(order) and (ahead <= place + 1 or ahead_bytes < READ_AHEAD_BYTES):
                waiting.append([pool.submit(piece) for piece in order[ahead].pieces()])
                ahead_bytes += order[ahead].nbytes
                ahead += 1
            finite = [piece.result() for piece in waiting.popleft()]
            ahead_bytes -= source.nbytes
            if not all(finite):
                bad = [source.name, *(later.name for later in order[place + 1 :] if not later.is_finite())]
                raise WeightsError(
                    listed(f"{source.parts[0].path}: {len(bad)} tensors hold NaN or infinite values:", bad)
                    + "\nSuch weights draw noise. Download them again, or export them without overflow."
                )
            yield source
