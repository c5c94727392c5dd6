"""The parser that the Transformer replaced in Table 4: a recurrent model with attention.

    transformer-jax train parsing_rnn --data.folder FOLDER
    transformer-jax evaluate RUN

FOLDER contains a treebank, as for the `parsing` config. The model is in the style of Vinyals et
al. (2015), the first row of Table 4: LSTMs with additive attention. It has about as many parameters
as the Transformer of the `parsing_small` config, and the same data, batches, and search.

Differs from the paper: the architecture, and gradient clipping.
"""

from configs.parsing_small import CONFIG as SMALL
from transformer_jax.config import ModelConfig
from transformer_jax.config.architectures import USED_BY

D_MODEL = 150
DEFAULTS = ModelConfig()

CONFIG = SMALL.change(
    model={
        **{k: getattr(DEFAULTS, k) for k, v in USED_BY.items() if "rnn" not in v},
        "architecture": "rnn",
        "attention_score": "additive",
        "rnn_input_feeding": True,
        "d_model": D_MODEL,
    },
    train={
        "clip_norm": 5.0,
        # The peak learning rate is the same as that of `parsing_small`.
        "learning_rate_scale": 0.6 * (D_MODEL / SMALL.model.d_model) ** 0.5,
    },
)
