"""`python -m portable_dit` is `portable-dit`."""

from portable_dit.cli import main

main()
