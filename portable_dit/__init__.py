"""portable-dit: Diffusion Transformers on any accelerator."""

__version__ = "0.1.0"
