"""Weights and inputs of HunyuanImage-3.0 that a formula defines, so that goldens need no file.

Value i of tensor j is frac(sin(12.9898 i + 78.233 j + 1) * 43758.5453) - 0.5, scaled by the tensor's fan-in.
"""

import torch

from portable_dit.models.hunyuan_image_3.checkpoint import tensor_map
from portable_dit.models.hunyuan_image_3.config import DiTConfig, HunyuanConfig, VAEConfig
from portable_dit.models.hunyuan_image_3.dit import HunyuanTransformer
from portable_dit.models.hunyuan_image_3.names import dit_tensors, vae_decoder_tensors
from portable_dit.models.hunyuan_image_3.vae import Decoder

DIT = DiTConfig(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    attention_head_dim=16,
    moe_intermediate_size=48,
    num_experts=4,
    moe_topk=2,
    vocab_size=300,
    patch_embed_hidden_dim=32,
)
VAE = VAEConfig(block_out_channels=(32, 64, 64, 128, 128), latent_channels=4)
CONFIG = HunyuanConfig(dit=DIT, vae=VAE)
CONDITIONAL = [1, 2, 3, 4, 5, 290, 291, 292]
UNCONDITIONAL = [1, 296, 296, 296, 296, 290, 291, 292]
SHAPE = (4, 6)


def formula(count: int, number: int) -> torch.Tensor:
    """float64 [count] in -0.5 .. 0.5."""
    i = torch.arange(count, dtype=torch.float64)
    wild = torch.sin(12.9898 * i + 78.233 * number + 1) * 43758.5453
    return wild - wild.floor() - 0.5


def values(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Stored name -> float32 tensor, numbered in the order of the names."""
    found = {}
    for number, name in enumerate(sorted(shapes)):
        shape = shapes[name]
        count = int(torch.Size(shape).numel())
        u = formula(count, number)
        if len(shape) > 1:
            u = u * 2 * (3 / (count / shape[0])) ** 0.5 * 0.7
        elif name.endswith("bias"):
            u = 0.1 * u
        else:
            u = 1 + 0.2 * u
        found[name] = u.reshape(shape).float()
    return found


def dit_values() -> dict[str, torch.Tensor]:
    """The stored tensors of the tiny transformer and its token table."""
    shapes = dit_tensors(DIT, VAE.latent_channels)
    return values({"model.wte.weight": (DIT.vocab_size, DIT.hidden_size), **shapes})


def load(module: torch.nn.Module, stored: dict[str, torch.Tensor], component: str) -> None:
    """Fills a module through the map that real checkpoints take."""
    sources = tensor_map(component, {name: tuple(t.shape) for name, t in stored.items()}, CONFIG).sources
    made = {name: source.make(*(stored[n] for n in source.names)) for name, source in sources.items()}
    state = {name: made[name] for name in module.state_dict() if name in made}
    for name in module.state_dict().keys() - state.keys():
        path = name.removesuffix(".weight")
        layers = [made[f"{path}.{expert}.weight"] for expert in range(DIT.num_experts)]
        state[name] = torch.stack(layers)
    module.load_state_dict(state)


def transformer() -> HunyuanTransformer:
    model = HunyuanTransformer(DIT, VAE.latent_channels).eval()
    load(model, dit_values(), "dit")
    return model


def decoder(config: VAEConfig = VAE) -> Decoder:
    model = Decoder(config).eval()
    shapes = vae_decoder_tensors(config)
    load(model, {f"vae.{name}": tensor for name, tensor in values(shapes).items()}, "vae")
    return model


def prompts() -> torch.Tensor:
    """Token states of both branches before the time slot: [2, 8, C]."""
    return dit_values()["model.wte.weight"][torch.tensor([CONDITIONAL, UNCONDITIONAL])]


def latents(number: int) -> torch.Tensor:
    return (formula(96, number) * 3.4).float().reshape(1, 4, *SHAPE)
