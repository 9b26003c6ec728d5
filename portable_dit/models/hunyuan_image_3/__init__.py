"""HunyuanImage-3.0 and its Instruct and Distil forms: text to image by the diffusion side alone."""
