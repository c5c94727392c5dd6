"""English constituency parsing with the paper's settings (section 6.3 and Table 4).

    transformer-jax train parsing --data.folder FOLDER
    transformer-jax evaluate RUN

FOLDER (or $TRANSFORMER_JAX_DATA) contains either the Wall Street Journal sections of the Penn
Treebank, with .mrg files in 02/ to 23/, or any treebank with train, dev, and test files: see
docs/parsing.md. The paper reports an F1 of 91.3 on section 23. The `parsing_small` config is small
enough to train on two CPU cores.

The paper states the number of layers, d_model, the vocabulary size, and the search settings. The
authors tuned the dropout rates and the learning rate on section 22 but do not report them, so this
config uses the values from Tensor2Tensor's transformer_parsing_base. According to the paper, all
other settings match the base model.

Differs from the paper: only the sentences use the vocabulary of 16,000 tokens. The trees have fewer
than 100 symbols, which form a separate vocabulary, as in Tensor2Tensor.
"""

from transformer_jax.config import Config

CONFIG = Config().change(
    model={
        "num_layers": 4,
        "d_model": 1024,
        "d_k": 128,
        "d_v": 128,
        "dropout": 0.2,
        "attention_dropout": 0.2,
        "max_length": 1024,
    },
    data={
        "corpus": "trees",
        "task": "parsing",
        "source_vocab_size": 16_000,
        "vocab_size": 512,
        "target_tokens": "words",
        "max_length": 512,
    },
    train={"warmup_steps": 16_000, "learning_rate_scale": 0.5},
    decode={"beam_size": 21, "length_penalty_alpha": 0.3, "max_extra_length": 300},
)
