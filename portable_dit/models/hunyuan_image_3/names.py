"""Every tensor of a HunyuanImage-3.0 checkpoint by its stored name, with its shape. Torch-free.

What pictures need comes in two groups, the transformer with its token table and the autoencoder's decoder.
The rest (word head, vision tower, the autoencoder's encoder) is listed so that a made-up checkpoint is whole
and a real one can be checked.
"""

from __future__ import annotations

from dataclasses import dataclass

from portable_dit.models.hunyuan_image_3.config import DiTConfig, HunyuanConfig, VAEConfig

Shapes = dict[str, tuple[int, ...]]
SINUSOIDS = 256


@dataclass(frozen=True)
class Tower:
    """Sizes of the vision tower, which reads pictures for edits: SigLIP2 so400m with patches of 16."""

    hidden: int = 1152
    ffn: int = 4304
    layers: int = 27
    positions: int = 256
    patch_values: int = 768


TOWER = Tower()


def all_tensors(config: HunyuanConfig, *, tower: Tower = TOWER) -> Shapes:
    """The whole checkpoint: 5,161 tensors at the published sizes, 5,169 in the Distil form."""
    dit, vae = config.dit, config.vae
    words = (dit.vocab_size, dit.hidden_size)
    found: Shapes = {"model.wte.weight": words, "model.ln_f.weight": words[1:], "lm_head.weight": words}
    found |= dit_tensors(dit, vae.latent_channels)
    found |= {f"vae.{name}": shape for name, shape in vae_decoder_tensors(vae).items()}
    found |= {f"vae.{name}": shape for name, shape in vae_encoder_tensors(vae).items()}
    return found | _tower_tensors(dit.hidden_size, tower)


def dit_tensors(config: DiTConfig, latent_channels: int) -> Shapes:
    """The transformer without its token table."""
    width = config.hidden_size
    found: Shapes = {}
    for layer in range(config.num_hidden_layers):
        found |= layer_tensors(config, f"model.layers.{layer}.")
    times = ["timestep_emb", "time_embed", "time_embed_2"]
    times += ["guidance_emb"] if config.cfg_distilled else []
    times += ["timestep_r_emb"] if config.use_meanflow else []
    for name in times:
        found |= _affine(f"{name}.mlp.0", width, SINUSOIDS) | _affine(f"{name}.mlp.2", width, width)
    inner = config.patch_embed_hidden_dim
    found |= _affine("patch_embed.model.0", inner, latent_channels, 3, 3)
    found |= _res_block("patch_embed.model.1", inner, width, width)
    found |= _res_block("final_layer.model.0", width, inner, width)
    found |= _affine("final_layer.model.1.0", inner)
    return found | _affine("final_layer.model.1.2", latent_channels, inner, 3, 3)


def layer_tensors(config: DiTConfig, prefix: str) -> Shapes:
    """One layer: 137 tensors at the published sizes, none with a bias."""
    width, head, shared = config.hidden_size, config.attention_head_dim, config.shared_size
    gated = {
        "mlp.shared_mlp.gate_and_up_proj": (2 * shared, width),
        "mlp.shared_mlp.down_proj": (width, shared),
    }
    for expert in range(config.num_experts):
        name, hidden = f"mlp.experts.{expert}", config.moe_intermediate_size
        gated |= {f"{name}.gate_and_up_proj": (2 * hidden, width), f"{name}.down_proj": (width, hidden)}
    plain: Shapes = {
        "self_attn.qkv_proj": (config.qkv_size, width),
        "self_attn.o_proj": (width, config.inner_size),
        "self_attn.query_layernorm": (head,),
        "self_attn.key_layernorm": (head,),
        "mlp.gate.wg": (config.num_experts, width),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    return {f"{prefix}{name}.weight": shape for name, shape in (plain | gated).items()}


def vae_decoder_tensors(config: VAEConfig) -> Shapes:
    """decoder.*: 160 tensors at the published sizes."""
    levels, cube = config.levels, (3, 3, 3)
    found = _affine("decoder.conv_in", levels[0], config.latent_channels, *cube)
    found |= _vae_middle("decoder.mid", levels[0])
    for level, channels in enumerate(levels):
        for block in range(config.layers_per_block + 1):
            found |= _vae_block(f"decoder.up.{level}.block.{block}", channels)
        if 2**level < config.ffactor_spatial:
            times = config.frames(level + 1) // config.frames(level)
            made = 4 * times * levels[level + 1]
            found |= _affine(f"decoder.up.{level}.upsample.conv", made, channels, *cube)
    found |= _affine("decoder.norm_out", levels[-1])
    return found | _affine("decoder.conv_out", config.out_channels, levels[-1], *cube)


def vae_encoder_tensors(config: VAEConfig) -> Shapes:
    """encoder.*: 120 tensors at the published sizes; edits need them, pictures from text do not."""
    levels, cube, downs = config.block_out_channels, (3, 3, 3), len(config.block_out_channels) - 1
    found = _affine("encoder.conv_in", levels[0], config.out_channels, *cube)
    for level, channels in enumerate(levels):
        for block in range(config.layers_per_block):
            found |= _vae_block(f"encoder.down.{level}.block.{block}", channels)
        if 2**level < config.ffactor_spatial:
            # The time shrinks in the last halvings, as the decoder stretches it in its first doublings.
            times = config.frames(downs - level) // config.frames(downs - level - 1)
            made = levels[level + 1] // (4 * times)
            found |= _affine(f"encoder.down.{level}.downsample.conv", made, channels, *cube)
    found |= _vae_middle("encoder.mid", levels[-1]) | _affine("encoder.norm_out", levels[-1])
    return found | _affine("encoder.conv_out", 2 * config.latent_channels, levels[-1], *cube)


def taps_of(name: str, config: VAEConfig) -> tuple[int, ...]:
    """Which time taps of a decoder's convolution ever meet a frame of a still picture."""
    if name.startswith("conv_out."):
        # Only the last frame is kept, and the one before it is all that its kernel sees besides.
        return (0, 1) if config.frames(len(config.levels)) > 1 else (1,)
    level = int(name.split(".")[1]) if name.startswith("up.") else 0
    return (1,) if config.frames(level) == 1 else (0, 1, 2)


def _affine(name: str, *shape: int) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _res_block(name: str, inputs: int, outputs: int, time: int) -> Shapes:
    return (
        _affine(f"{name}.in_layers.0", inputs)
        | _affine(f"{name}.in_layers.2", outputs, inputs, 3, 3)
        | _affine(f"{name}.emb_layers.1", 2 * outputs, time)
        | _affine(f"{name}.out_layers.0", outputs)
        | _affine(f"{name}.out_layers.3", outputs, outputs, 3, 3)
        | _affine(f"{name}.skip_connection", outputs, inputs, 1, 1)
    )


def _vae_block(name: str, channels: int) -> Shapes:
    found: Shapes = {}
    for number in (1, 2):
        found |= _affine(f"{name}.norm{number}", channels)
        found |= _affine(f"{name}.conv{number}", channels, channels, 3, 3, 3)
    return found


def _vae_middle(name: str, channels: int) -> Shapes:
    found = _vae_block(f"{name}.block_1", channels) | _vae_block(f"{name}.block_2", channels)
    found |= _affine(f"{name}.attn_1.norm", channels)
    for part in ("q", "k", "v", "proj_out"):
        found |= _affine(f"{name}.attn_1.{part}", channels, channels, 1, 1, 1)
    return found


def _tower_tensors(width: int, tower: Tower) -> Shapes:
    inner, ffn = tower.hidden, tower.ffn
    embeddings, head = "vision_model.embeddings", "vision_model.head"
    found = _affine(f"{embeddings}.patch_embedding", inner, tower.patch_values)
    found |= {f"{embeddings}.position_embedding.weight": (tower.positions, inner)}
    for layer in range(tower.layers):
        name = f"vision_model.encoder.layers.{layer}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found |= _affine(f"{name}.self_attn.{part}", inner, inner)
        found |= _affine(f"{name}.layer_norm1", inner) | _affine(f"{name}.layer_norm2", inner)
        found |= _affine(f"{name}.mlp.fc1", ffn, inner) | _affine(f"{name}.mlp.fc2", inner, ffn)
    found |= _affine("vision_model.post_layernorm", inner)
    found |= {f"{head}.probe": (1, 1, inner), f"{head}.attention.in_proj_weight": (3 * inner, inner)}
    found |= {f"{head}.attention.in_proj_bias": (3 * inner,)} | _affine(f"{head}.layernorm", inner)
    found |= _affine(f"{head}.attention.out_proj", inner, inner)
    found |= _affine(f"{head}.mlp.fc1", ffn, inner) | _affine(f"{head}.mlp.fc2", inner, ffn)
    found |= _affine("vision_aligner.layers.0", width, inner)
    return found | _affine("vision_aligner.layers.2", width, width)
