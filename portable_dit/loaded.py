"""A loaded model, and how its joints are called: plainly, from graphs, or together with other ranks.

Torch is imported when something is called, since the command line looks at this file without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from portable_dit.models.spec import Denoiser, Model, TileRunner

if TYPE_CHECKING:
    from torch import Tensor

    from portable_dit.batches import Batches
    from portable_dit.graphs import Graphs
    from portable_dit.offload import ComponentOffload, LayerOffload
    from portable_dit.parallel.mesh import Mesh
    from portable_dit.prompt_cache import PromptCache
    from portable_dit.sampling import BlockRunner


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model with its weights, the calls that are captured, and the components that visit the device.

    prompts: text states of earlier requests. batches: which shapes may be denoised side by side. mesh: this
    rank's groups, None when one device does it all.
    """

    model: Model
    graphs: Graphs
    captured: Mapping[str, bool]
    visitors: Mapping[str, ComponentOffload]
    streamed: tuple[LayerOffload, ...]
    bytes_read: int
    prompts: PromptCache
    batches: Batches
    mesh: Mesh | None = None

    def runner(self, denoiser: Denoiser) -> BlockRunner:
        """How the blocks of a request's denoiser are called."""
        from portable_dit.sampling import run_blocks

        run = self.graphs.blocks if self.captured["dit"] else run_blocks
        if self.mesh is None or self.mesh.group("sequence").size == 1:
            return run
        from portable_dit.parallel.sequence import SplitRows

        return SplitRows(denoiser, self.mesh.group("sequence"), run)

    @property
    def run_tiles(self) -> TileRunner:
        """How VAE tiles are decoded."""
        from portable_dit.tiles import run_tiles

        run = self.graphs.tiles if self.captured["vae"] else run_tiles
        if self.mesh is None or self.mesh.group("tiles").size == 1:
            return run
        from portable_dit.parallel.vae import SharedTiles

        return SharedTiles(self.mesh.group("tiles"), run)

    def branches(self, count: int) -> tuple[int, ...]:
        """Which of a request's guidance branches this rank evaluates."""
        if self.mesh is None or self.mesh.group("guidance").size == 1:
            return tuple(range(count))
        from portable_dit.parallel.guidance import own_branches

        return own_branches(count, self.mesh.group("guidance"))

    def combiner(self, count: int, scale: float, rescale: float) -> Callable[[Tensor], Tensor]:
        """How the velocities of a request's branches become one."""
        from portable_dit.sampling import guided

        combine = partial(guided, scale=scale, rescale=rescale)
        if self.mesh is None:
            return combine
        from portable_dit.parallel.guidance import with_all_branches

        return with_all_branches(count, self.mesh.group("guidance"), combine)

    def with_room(self, call: Callable[[], T]) -> T:
        """call(), once more without captured graphs where memory is short; with other ranks, call() as it is.

        A rank that tried again alone would leave the others waiting.
        """
        return call() if self.mesh is not None else self.graphs.with_room(call)

    @contextmanager
    def on_device(self, *components: str) -> Iterator[None]:
        """The named components have their weights on the device inside."""
        with ExitStack() as stack:
            for name in components:
                if name in self.visitors:
                    stack.enter_context(self.visitors[name].on_device())
            yield

    def release(self) -> None:
        """Takes offload apart; weights go when nobody holds the model."""
        for layers in self.streamed:
            layers.remove()
