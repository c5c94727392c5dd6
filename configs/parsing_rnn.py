"""A recurrent parser with attention, for comparison with the Transformer (Table 4).

    transformer-jax train parsing_rnn --data.folder FOLDER
    transformer-jax evaluate RUN

FOLDER contains a treebank, as described in configs/parsing.py. Like the model in the first row of
Table 4 (Vinyals et al. 2015), this parser consists of LSTMs with additive attention. The parser has
about as many parameters as the Transformer in the `parsing_small` config, and it uses the same
data, batches, and search settings.

Differs from the paper: the architecture is recurrent, and training clips the gradient.
"""

from configs.parsing_small import CONFIG as SMALL
from transformer_jax.config.architectures import unused_defaults

D_MODEL = 150

CONFIG = SMALL.change(
    model={
        **unused_defaults("rnn"),
        "architecture": "rnn",
        "attention_score": "additive",
        "rnn_input_feeding": True,
        "d_model": D_MODEL,
    },
    train={
        "clip_norm": 5.0,
        # This scale makes the peak learning rate the same as in `parsing_small`.
        "learning_rate_scale": SMALL.train.learning_rate_scale
        * (D_MODEL / SMALL.model.d_model) ** 0.5,
    },
)
