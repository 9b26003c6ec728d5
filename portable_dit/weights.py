"""Weights: safetensors from disk into a module on the meta device, one tensor at a time.

Names, shapes and dtypes are compared before a byte of a tensor is read, and everything that is missing,
unexpected or mismatched is told in one message. Then tensors stream in the order of the files: worker
threads read ahead and look for NaN, this thread converts, places and lets go. A weight that is stored in the
very format its layer runs is handed over as it is, since rounding twice would change it.

Letters: N out features, K in features.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from portable_dit.errors import WeightsError
from portable_dit.manifest import MANIFEST, file_problem, read_manifest
from portable_dit.safetensors_file import ITEM_BYTES, StoredTensor, listed, stored_tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from portable_dit.formats import Encoded, Format
    from portable_dit.lora import Change
    from portable_dit.models.spec import TensorSource
    from portable_dit.shares import Run, Share
    from portable_dit.slots import Target
    from portable_dit.weight_cache import CachedWeights

HOST = "cpu"  # what torch calls the host's memory, where files are mapped
SCALE_SUFFIX = "_scale"
READERS = 4
READ_AHEAD_BYTES = 40 << 20  # waits in memory, or the one next tensor if that is larger
PIECE_BYTES = 8 << 20  # of a tensor, for one reader at a time
MARKER_BYTES = 1 << 16  # a longer row of bytes is no text
SMALL_BYTES = 1 << 30  # up to this much is hashed at every load; more is for `weights verify`
UNMAKEABLE = (RuntimeError, IndexError, ValueError)  # what a source raises for tensors of other shapes


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

    def tensors(self, *places: str | Path) -> Mapping[str, StoredTensor]:
        """All tensors of a component's folders and files by name.

        places: relative to the checkpoint, or paths of their own. Raises WeightsError for missing or damaged
        files, and for a name that stands in two places.
        """
        found: dict[str, StoredTensor] = {}
        for place in places:
            more = stored_tensors(self.folder / place)
            twice = [name for name in more if name in found]
            if twice:
                raise WeightsError(listed(f"{self.folder / place}: tensors that {places[0]} has too:", twice))
            found |= more
        return found


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
    encode_on: str | None = None,
    unused: Collection[str] = (),
    title: str = "weights",
    shares: Mapping[str, Share] | None = None,
    changes: Mapping[str, Change] | None = None,
    cache: CachedWeights | None = None,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Fills parameters, persistent buffers and quantised layers of a meta module; gives the bytes read.

    sources: for each name of the module, what it is made of. device: where each name goes. encode_on: the
    device that encodes, None = where the weight goes, which a host does slowly. unused: stored names without
    a use. shares: the parameters of which this rank holds a part, which alone is read. changes: what adapters
    add to parameters. cache: where encoded weights are taken from, or put. on_bytes: told the bytes that were
    placed and how many there are. The module's parameters say the target dtype and shape. An 8-bit weight
    with a `_scale` beside it is expanded to float32 first, the master from which every precision is made.
    """
    from portable_dit.slots import ExpertSlot, QuantizedSlot, Slot, placed, rounded, targets_of

    _place_constants(module, device)
    targets = targets_of(module)
    shares, changes = shares or {}, changes or {}
    made = {
        name: Made(name, stored, source, shares.get(name), changes.get(name), encode_on or device(name))
        for name, source in sources.items()
    }
    _compare(made, targets, stored, unused, title)
    cached = cache.tensors if cache is not None else {}
    expected = sum(cached[name].nbytes if name in cached else made[name].nbytes for name in targets)
    done = 0
    for name in [name for name in targets if name in cached]:
        target = targets.pop(name)
        assert cache is not None
        assert isinstance(target, QuantizedSlot)
        target.put(placed(cache.read(name), device(name)))
        cached[name].release()
        done += cached[name].nbytes
        on_bytes(done, expected)
    for source in _read_ahead([made[name] for name in targets]):
        target = targets[source.name]
        place = device(source.name)
        if isinstance(target, Slot | ExpertSlot):
            target.fill(rounded(source, target, place))
        else:
            encoded = target.accept(source, place, encode_on or place)
            if cache is not None:
                cache.write(source.name, encoded)
            del encoded
        source.release()
        done += source.nbytes
        on_bytes(done, expected)
    return done


def _place_constants(module: nn.Module, device: Callable[[str], str]) -> None:
    """Takes buffers that are in no file, such as a rotary embedding's frequencies, to where weights go."""
    for path, owner in module.named_modules():
        for name in owner._non_persistent_buffers_set:
            buffer = owner._buffers[name]
            if buffer is not None and not buffer.is_meta:
                owner._buffers[name] = buffer.to(device(f"{path}.{name}" if path else name))


def fill_random(
    module: nn.Module,
    *,
    device: Callable[[str], str],
    draw_on: str = HOST,
    shares: Mapping[str, Share] | None = None,
    seed: int = 0,
    on_tensor: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Right shapes without meaning, for trying a layout before the weights are there.

    Matrices and kernels are normal with variance 1 / inputs, so activations keep their scale; vectors are
    ones or zeros. Each is drawn whole, from its name, so that all layouts and offloads draw the same picture.
    device: where each name goes. draw_on: the device that draws and encodes, whatever the place: a host takes
    minutes for what is offloaded. on_tensor: told how many are done, and of how many.
    """
    import torch

    from portable_dit.slots import ExpertSlot, Slot, placed, targets_of

    _place_constants(module, device)
    targets = targets_of(module)
    for number, (name, target) in enumerate(targets.items()):
        on_tensor(number, len(targets))
        place, shape, dtype = device(name), list(target.shape), target.dtype
        share = (shares or {}).get(name)
        if share is not None:
            shape[share.dim] = share.whole
        if len(shape) > 1 and dtype.is_floating_point:
            generator = torch.Generator(draw_on).manual_seed(seed + crc32(name.encode()))
            tensor = torch.empty(shape, dtype=torch.float32, device=draw_on)
            inputs = math.prod(shape[1:]) if len(shape) > 3 else shape[-1]  # of experts and heads: the last
            tensor.normal_(0.0, inputs**-0.5, generator=generator)
        else:
            tensor = torch.full(shape, float(not name.endswith("bias")), device=draw_on)
        if share is not None:
            tensor = share.cut(tensor)
        if isinstance(target, Slot | ExpertSlot):
            target.fill(tensor.to(dtype, copy=share is not None).to(place))
        else:
            target.put(placed(target.encoded(tensor, share), place))


@dataclass(frozen=True, eq=False)
class Made:
    """One parameter of the module and the stored tensors that it is made of.

    share: the part that is held. change: what adapters add to the whole, made on the device `change_on`.
    """

    name: str
    stored: Mapping[str, StoredTensor]
    source: TensorSource
    share: Share | None = None
    change: Change | None = None
    change_on: str = HOST

    @property
    def parts(self) -> list[StoredTensor]:
        return [self.stored[name] for name in self.source.names]

    @cached_property
    def runs(self) -> tuple[Run, ...] | None:
        """What of the stored tensors makes the share; None when all of them are needed."""
        from portable_dit.shares import runs_of

        return None if self.share is None else runs_of(self.source, self.parts, self.share)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.runs or self.parts)

    def pieces(self) -> list[Callable[[], bool]]:
        """Calls that read a piece of the stored tensors each, and say whether it is finite."""
        scales = [scale for name in self.source.names if (scale := _scale_of(name, self.stored))]
        if self.runs is not None:
            found = [partial(_is_finite, piece) for run in self.runs for piece in run.pieces(PIECE_BYTES)]
            return [*found, *(partial(scale.is_finite, 0, None) for scale in scales)]
        return [
            partial(part.is_finite, first, first + PIECE_BYTES)
            for part in (*self.parts, *scales)
            for first in range(0, part.nbytes, PIECE_BYTES)
        ]

    def is_finite(self) -> bool:
        return all(piece() for piece in self.pieces())

    def read(self, shape: tuple[int, ...], place: str = HOST) -> Tensor:
        """The tensor: float32 where it had to be expanded, else often a view of the file.

        It is at the place already where making it only puts rows in order, which a device does faster; else
        on the host.
        """
        import torch

        place = place if self.source.by_rows else HOST
        try:
            if self.runs is not None:
                cut = [_expanded(run.part.name, self.stored, run).to(place) for run in self.runs]
                tensor: Tensor = cut[0] if len(cut) == 1 else torch.cat(cut)
            else:
                stored = (_expanded(name, self.stored).to(place) for name in self.source.names)
                tensor = self.source.make(*stored)
                tensor = tensor if self.share is None else self.share.cut(tensor)
        except UNMAKEABLE as error:
            raise WeightsError(f"{self.name}: cannot be made of {self.describe()} ({error}).") from error
        if tuple(tensor.shape) != shape:
            raise WeightsError(f"{self.name}: {self.describe()} stored, {list(shape)} expected.")
        if self.change is not None:
            added = self.change.on(self.change_on)
            added = added if self.share is None else self.share.cut(added)
            self.change.require_proportion(self.name, tensor, added)
            tensor = added.to(tensor.device).contiguous().add_(tensor)
        return tensor

    def encoded(self, form: Format) -> Encoded | None:
        """The weight as it is stored, when that is the format already; None when it must be encoded."""
        import torch

        from portable_dit.formats import WHOLE, Encoded

        if self.change is not None:
            return None
        scales = [_scale_of(name, self.stored) for name in self.source.names]
        rows = [part.shape[0] if part.shape else 0 for part in self.parts]
        if not self.source.by_rows or form.scales is not torch.float32 or form.rotated:
            return None  # by_rows says that nothing turns the numbers back, so their basis is the plain one
        if form.block[1] != WHOLE or any(_torch_dtype(part.dtype) is not form.values for part in self.parts):
            return None
        spread = [
            as_tensor(scale).float().reshape(-1, 1).expand(count, 1)
            for scale, count in zip(scales, rows, strict=True)
            if scale is not None
        ]
        if len(spread) != len(rows):
            return None
        if form.block[0] == WHOLE:
            if any(bool((each != spread[0][0]).any()) for each in spread):
                return None
        elif form.block[0] != 1:
            return None
        if self.share is None:
            values = self.source.make(*(as_tensor(part) for part in self.parts))
            each = self.source.make(*spread).contiguous()  # [N, 1]
        elif self.runs is not None:
            scale_of = {part.name: scale for part, scale in zip(self.parts, spread, strict=True)}
            values = torch.cat([run.of(as_tensor(run.part)) for run in self.runs])
            each = torch.cat([run.of(scale_of[run.part.name]) for run in self.runs])
        else:
            return None
        return Encoded(form, values, each[:1].contiguous() if form.block[0] == WHOLE else each)

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
            return tensor if self.share is None else self.share.cut(tensor)
        except UNMAKEABLE:
            return None

    def release(self) -> None:
        for part in self.parts:
            part.release()

    def describe(self) -> str:
        return " and ".join(f"{part.name} {part.dtype} {list(part.shape)}" for part in self.parts)


def _scale_of(name: str, stored: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """The scale beside an 8-bit tensor."""
    return stored.get(name + SCALE_SUFFIX) if stored[name].dtype in ("I8", "F8_E4M3", "F8_E5M2") else None


def _expanded(name: str, stored: Mapping[str, StoredTensor], run: Run | None = None) -> Tensor:
    """A stored tensor, or a run of it, as it is, or values times scales in float32."""
    values, scale = as_tensor(stored[name]), _scale_of(name, stored)
    cut = values if run is None else run.of(values)
    if scale is None:
        return cut.float() if stored[name].dtype.startswith("F8") else cut
    each = as_tensor(scale).float().reshape(-1, *[1] * (values.dim() - 1))  # [N, 1] or [1, 1]
    if run is not None and len(each) > 1:
        each = run.of(each)
    return cut.float() * each


def _is_finite(run: Run) -> bool:
    import torch

    tensor = run.of(as_tensor(run.part))
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.float()).all())


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
    made: Mapping[str, Made],
    targets: Mapping[str, Target],
    stored: Mapping[str, StoredTensor],
    unused: Collection[str],
    title: str,
) -> None:
    """Raises WeightsError that lists everything by which a checkpoint differs from its module."""
    wanted = {name: m for name, m in made.items() if name in targets}
    used = {name for m in wanted.values() for name in m.source.names}
    scales = {name + SCALE_SUFFIX for name in used if name in stored and _scale_of(name, stored)}
    absent = {name: [part for part in m.source.names if part not in stored] for name, m in wanted.items()}
    whole = [name for name in wanted if not absent[name]]
    with _joined_as_shapes():
        misfits = [problem for name in whole if (problem := _mismatch(wanted[name], targets[name], stored))]
    problems = {
        "missing": [name for name in targets if name not in made or absent[name]],
        "unexpected": sorted(stored.keys() - used - scales - set(unused)),
        "mismatched": misfits,
    }
    parts = [listed(f"{len(names)} {kind}:", names) for kind, names in problems.items() if names]
    if parts:
        raise WeightsError(
            f"{title}: the checkpoint does not fit the model that its config describes.\n"
            + "\n".join(parts)
            + "\nUse the config.json and the weights of one and the same checkpoint."
        )


def _joined_as_shapes() -> AbstractContextManager[object]:
    """Inside, `torch.cat` on the meta device is done here.

    For its own one there torch (2.13) imports its whole compiler, which takes two seconds at every start.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class JoinedAsShapes(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            named = kwargs or {}
            if function is not torch.cat or {t.device.type for t in args[0]} != {"meta"}:
                return function(*args, **named)
            dim = named.get("dim", args[1] if len(args) > 1 else 0) % args[0][0].dim()
            shapes = [list(t.shape) for t in args[0]]
            total = sum(shape.pop(dim) for shape in shapes)
            if any(shape != shapes[0] for shape in shapes):
                raise RuntimeError(f"cannot join {[list(t.shape) for t in args[0]]} along {dim}")
            dtype = reduce(torch.promote_types, [t.dtype for t in args[0]])
            return args[0][0].new_empty([*shapes[0][:dim], total, *shapes[0][dim:]], dtype=dtype)

    return JoinedAsShapes()


def _mismatch(made: Made, target: Target, stored: Mapping[str, StoredTensor]) -> str | None:
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


def _read_ahead(sources: list[Made]) -> Iterator[Made]:
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
                what = "1 tensor holds" if len(bad) == 1 else f"{len(bad)} tensors hold"
                what += " NaN or infinite values, or float64 beyond float32:"
                raise WeightsError(
                    listed(f"{source.parts[0].path}: {what}", bad)
                    + "\nSuch weights draw noise. Download them again, or export them without overflow."
                )
            yield source
