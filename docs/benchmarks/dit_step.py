"""One denoise step of h3-mini, ours and diffusers': python docs/benchmarks/dit_step.py [--rounds 31]

Prints a table in Markdown. The same random weights and the same inputs run through

- diffusers: `MiniMaxH3Transformer3DModel`, its default attention;
- ours, whole: `H3Transformer.forward`, the same work (text refiner and modulation included);
- ours, as drawn: embed, blocks and head with the fixed tables, which is what the engine runs at each step.

Ours have the kernels bound that the plan chooses on this machine. All three are timed in turn, again and
again, so that a busy moment hits all of them. CPU seconds count all threads; with OMP_NUM_THREADS=1 they say
on a busy machine what the wall clock cannot.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch import Tensor, nn

import portable_dit
from portable_dit.bind import bind
from portable_dit.models.h3_image.checkpoint import tensor_map
from portable_dit.models.h3_image.config import DiTConfig, H3Config
from portable_dit.models.h3_image.dit import H3Transformer
from portable_dit.models.h3_image.packing import Packing, pack, patchify
from portable_dit.ops import Modulation

TIME, CONDITION_TIME = 0.25, 0.999
Step = Callable[[], Tensor]


def empty_diffusers_model(config: H3Config) -> MiniMaxH3Transformer3DModel:
    """At the sizes of our config, on the device in whose context it is made."""
    dit = config.dit
    return MiniMaxH3Transformer3DModel(
        num_attention_heads=dit.num_attention_heads,
        attention_head_dim=dit.attention_head_dim,
        hidden_size=dit.hidden_size,
        num_layers=dit.num_layers,
        num_refiner_layers=dit.token_refiner_num_layers,
        ffn_dim=dit.ffn_hidden_size,
        in_channels=dit.latents_dim,
        patch_size=dit.patch_size,
        text_dim=dit.text_dim,
        freq_dim=dit.timestep_input_dim,
        time_embed_hidden_dim=dit.time_embed_hidden_size,
        time_embed_dim=dit.time_embed_dim,
        rope_freq_dim=dit.rope_inv_freq_len,
    ).eval()


def diffusers_model(config: H3Config) -> MiniMaxH3Transformer3DModel:
    """With random weights."""
    model = empty_diffusers_model(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        near_one = parameter.ndim == 1 and not name.endswith("bias")
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 10
        parameter.data.copy_(1.0 + 0.2 * noise if near_one else noise * fan_in**-0.5)
    return model


def our_model(theirs: nn.Module, config: H3Config, dtype: torch.dtype) -> H3Transformer:
    """Ours with their weights, and with the kernels that the plan chooses for this dtype."""
    stored = theirs.state_dict()
    names = tensor_map("dit", {name: tuple(tensor.shape) for name, tensor in stored.items()}, config).sources
    ours = H3Transformer(config.dit, dtype).eval()
    ours.load_state_dict(
        {name: source.make(*[stored[n] for n in source.names]) for name, source in names.items()}
    )
    precision = str(dtype).removeprefix("torch.")
    setup = portable_dit.set_up("cpu/h3-mini", {"precision": precision})
    bind(ours, setup.backend, setup.plan.choices("dit"))
    return ours


def in_dtype(model: MiniMaxH3Transformer3DModel, dtype: torch.dtype) -> MiniMaxH3Transformer3DModel:
    """As from_pretrained(torch_dtype=dtype) leaves it: the layers that diffusers keeps in float32 stay."""
    model = nn.Module.to(copy.deepcopy(model), dtype)
    for name, module in model.named_modules():
        if name.split(".")[0] in (model._keep_in_fp32_modules or ()):
            module.float()
    return model


@dataclass(frozen=True)
class Inputs:
    """What a step of side x side latent cells is given. references: latents of pictures before it."""

    text: Tensor
    latents: Tensor
    packing: Packing
    references: tuple[Tensor, ...] = ()

    @property
    def times(self) -> Tensor:
        return torch.tensor([TIME, CONDITION_TIME])


def inputs(config: DiTConfig, side: int, text_rows: int, reference_sides: tuple[int, ...] = ()) -> Inputs:
    generator = torch.Generator().manual_seed(1)

    def latents(side: int) -> Tensor:
        return torch.randn(1, config.latents_dim, side, side, generator=generator)

    text = torch.randn(1, text_rows, config.text_dim, generator=generator)
    target, references = latents(side), tuple(latents(side) for side in reference_sides)
    shapes = [(side, side) for side in reference_sides]
    packing = pack(torch.ones(text_rows, dtype=torch.long), shapes, (side, side))
    return Inputs(text, target, packing, references)


def diffusers_step(theirs: nn.Module, given: Inputs, *, dtype: torch.dtype, device: str = "cpu") -> Step:
    """One step of diffusers' module on its device."""
    packing, text_rows = given.packing, given.text.shape[1]
    arguments = {
        "hidden_states": torch.cat([patchify(z) for z in (*given.references, given.latents)], dim=1),
        "audio_hidden_states": torch.zeros(1, 0, theirs.config.audio_in_channels),
        "encoder_hidden_states": given.text.to(dtype),
        "timestep": given.times,
        "timestep_indices": packing.row_times,
        "token_tags": packing.tags,
        "position_ids": packing.positions,
        "video_indices": torch.arange(text_rows, len(packing.tags)),
        "audio_indices": torch.zeros(0, dtype=torch.long),
        "text_indices": torch.arange(text_rows),
    }
    placed = {name: tensor.to(device) for name, tensor in arguments.items()}
    return lambda: theirs(**placed).sample


def steps(theirs: nn.Module, ours: H3Transformer, given: Inputs) -> dict[str, Step]:
    """The three ways of one step."""
    config, packing, times = ours.config, given.packing, given.times
    text, rows = given.text.to(ours.dtype), patchify(given.latents)
    positions = packing.positions[None].float()

    def whole() -> Tensor:
        return ours(
            rows,
            text,
            times=times[None],
            row_times=packing.row_times[None],
            tags=packing.tags[None],
            positions=positions,
        )

    drawn = copy.deepcopy(ours)
    tables = drawn.modulation_tables(times.tolist())
    drawn.drop_adaln()
    prefix, rotary = drawn.prefix(text), drawn.rotary(positions)
    index = (packing.row_times * config.num_tags + packing.tags)[None]
    final = Modulation(tables.final, packing.row_times[None, -packing.target_rows :])

    def as_drawn() -> Tensor:
        hidden = drawn.embed(rows, prefix)
        for block, table in zip(drawn.blocks, tables.blocks, strict=True):
            hidden = block(hidden, Modulation(table, index), rotary)
        return drawn.head(hidden, packing.target_rows, final)

    diffusers = diffusers_step(theirs, given, dtype=ours.dtype)
    return {"diffusers": diffusers, "ours, whole": whole, "ours, as drawn": as_drawn}


def measure(ways: dict[str, Step], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(wall, CPU) seconds of every way in every round, after three rounds that do not count."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 3):
        for name, step in ways.items():
            start, cpu = time.perf_counter(), time.process_time()
            step()
            if number >= 3:
                seconds[name].append((time.perf_counter() - start, time.process_time() - cpu))
    return seconds


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=512, help="pixels of a side")
    parser.add_argument("--text-rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=31)
    arguments = parser.parse_args()
    config = H3Config.from_folder(Path(portable_dit.__file__).parent / "models" / "h3_mini")
    config = replace(config, dit=replace(config.dit, pdd_heads=0))  # diffusers has one head
    reference = diffusers_model(config)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.size}x{arguments.size}\n"
    )
    print("| dtype | | median, ms | CPU, ms | times diffusers' | CPU times diffusers' | off from float32 |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    exact = None
    for dtype in (torch.float32, torch.bfloat16):
        ours = our_model(reference, config, dtype)
        given = inputs(config.dit, arguments.size // config.vae.ratio, arguments.text_rows)
        ways = steps(in_dtype(reference, dtype), ours, given)
        exact = ways["diffusers"]() if exact is None else exact
        seconds = measure(ways, arguments.rounds)
        base = [statistics.median(values) for values in zip(*seconds["diffusers"], strict=True)]
        for name, own in seconds.items():
            wall, cpu = (statistics.median(values) for values in zip(*own, strict=True))
            off = float((ways[name]().float() - exact).abs().max() / exact.abs().max())
            print(
                f"| {str(dtype)[6:]} | {name} | {1e3 * wall:.1f} | {1e3 * cpu:.1f} "
                f"| {wall / base[0]:.2f} | {cpu / base[1]:.2f} | {off:.1e} |"
            )


if __name__ == "__main__":
    main()
