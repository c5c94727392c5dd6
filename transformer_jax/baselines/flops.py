"""Count the multiply-adds in recurrent and convolutional layers, excluding the output projection.

Shapes: B sentence pairs in a batch.
"""

import numpy as np
from jaxtyping import Float

from transformer_jax.config import ModelConfig

GATES = {"lstm": 4, "gru": 3}


def recurrent_multiply_adds(
    config: ModelConfig, source: Float[np.ndarray, " B"], target: Float[np.ndarray, " B"]
) -> float:
    """Return the number of multiply-adds in the recurrent layers, given sentence lengths."""
    square, gates = config.d_model**2, GATES[config.rnn_cell]
    # In each direction, a cell of width d_model / 2 reads a vector of width d_model and its own
    # state.
    encoder = config.num_layers * gates * 1.5 * square
    decoder = (2 * config.num_layers + config.rnn_input_feeding) * gates * square
    total = encoder * source.sum() + decoder * target.sum()
    if config.attention_score == "none":
        return float(total)
    # The attentional vector requires a matrix product with the concatenated context and output.
    return float(
        total + 2 * square * target.sum() + attention_multiply_adds(config, source, target)
    )


def convolutional_multiply_adds(
    config: ModelConfig, source: Float[np.ndarray, " B"], target: Float[np.ndarray, " B"]
) -> float:
    """Return the number of multiply-adds in the convolutional layers, given sentence lengths."""
    square = config.d_model**2
    convolution = 2 * config.conv_kernel_width * square
    # A decoder layer also has linear layers for the query and the context.
    layer = convolution * source.sum() + (convolution + 2 * square) * target.sum()
    layer += attention_multiply_adds(config, source, target)
    return float(config.num_layers * layer)


def attention_multiply_adds(
    config: ModelConfig, source: Float[np.ndarray, " B"], target: Float[np.ndarray, " B"]
) -> float:
    """Return the number of multiply-adds for one layer's attention to the source."""
    square = config.d_model**2
    total = 2 * config.d_model * np.sum(source * target)
    if config.attention_score == "general":
        total += square * target.sum()
    if config.attention_score == "additive":
        total += square * (source + target).sum()
    return float(total)
