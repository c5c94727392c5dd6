"""The parser that the Transformer replaced in Table 4: a recurrent model with attention.

    transformer-jax train parsing_rnn --data.folder FOLDER
    transformer-jax evaluate RUN

FOLDER contains a treebank, as for the `parsing` config. Like the model in the first row of Table 4
(Vinyals et al. 2015), this one consists of LSTMs with additive attention. It has about as many
parameters as the Transformer in the `parsing_small` config, and it uses the same data, batches, and
search settings.

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
        # The peak learning rate is the same as that of `parsing_small`.
        "learning_rate_scale": SMALL.train.learning_rate_scale
        * (D_MODEL / SMALL.model.d_model) ** 0.5,
    },
)
