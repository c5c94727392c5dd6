"""Choose the number of batch shapes that minimizes the time for compilation and training.

XLA compiles a training step for each batch shape. More shapes require more compilation but less
padding. The choice depends only on the config, so the order of the data is the same on every
machine. The constants describe one H100 (see docs/performance.md). On a CPU, steps take much longer
than compilation, so more shapes than the chosen number can save time.
"""

from transformer_jax.config import sections

# With a single shape, every pair would be as wide as the longest one.
MIN_BATCH_SHAPES = 2
# One more shape takes about 20 s to compile, but about eight shapes are compiled concurrently.
SECONDS_PER_SHAPE = 2.5
# Starting the kernels of a step takes at least this long, such as 4.4 ms for the Multi30k recipe.
MIN_STEP_SECONDS = 4e-3
# The base model's step computes 9.4 TFLOP in 41.9 ms, excluding the time above.
FLOPS_PER_SECOND = 250e12
# If there are k shapes, about 0.7 k^-0.8 of all positions in Multi30k's batches are padding.
PADDING_FACTOR, PADDING_EXPONENT = 0.7, -0.8


def choose_num_shapes(
    model: sections.ModelConfig, data: sections.DataConfig, train: sections.TrainConfig
) -> int:
    """Return the number of batch shapes that minimizes the expected training time.

    The time includes compilation. For comparison, the function assumes that training with any
    number of shapes processes as many tokens as `train.steps` batches without padding.
    """
    flops = 6 * data.batch_tokens * _count_multiplied_parameters(model, data.vocab_size)
    full_seconds = train.steps * (MIN_STEP_SECONDS + flops / FLOPS_PER_SECOND)

    def seconds(shapes: int) -> float:
        density = 1 - PADDING_FACTOR * shapes**PADDING_EXPONENT
        return SECONDS_PER_SHAPE * shapes + full_seconds / density

    return min(range(MIN_BATCH_SHAPES, sections.MAX_BATCH_SHAPES + 1), key=seconds)


def _count_multiplied_parameters(model: sections.ModelConfig, vocab_size: int) -> int:
    """Estimate how many parameters a step multiplies by a source vector and by a target vector."""
    attention = 2 * model.d_model * model.num_heads * (model.d_k + model.d_v)
    feed_forward = (3 if model.feed_forward in sections.GATED else 2) * model.d_model * model.d_ff
    encoder, decoder = model.layers_per_stack
    layers = encoder * (attention + feed_forward) + decoder * (2 * attention + feed_forward)
    return layers + model.d_model * vocab_size
