"""`python -m transformer_jax` runs the command `transformer-jax`."""

import sys

from transformer_jax.cli import main

sys.exit(main())
