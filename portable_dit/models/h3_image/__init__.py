"""The H3-Image family: MiniMax-H3-Image and the built-in h3-mini differ only in their configs."""
