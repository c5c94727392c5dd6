"""`python -m transformer_jax` runs the `transformer-jax` command."""

import sys

from transformer_jax.cli import main

sys.exit(main())
