"""`python -m transformer_jax` is `transformer-jax`."""

import sys

from transformer_jax.cli import main
from transformer_jax.training.heartbeat import leave

sys.exit(leave(main))
