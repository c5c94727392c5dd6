"""Constituency parsing on two CPU cores, with a smaller model and greedy search.

    transformer-jax train parsing_small --data.folder FOLDER
    transformer-jax evaluate RUN

FOLDER contains a treebank, as described in configs/parsing.py. Training skips sentences whose trees
have more than 111 symbols, but almost all sentences with at most 40 words have smaller trees.
"""

from configs.parsing import CONFIG as PARSING

CONFIG = PARSING.change(
    model={
        "num_layers": 2,
        "d_model": 128,
        "d_ff": 512,
        "num_heads": 4,
        "d_k": 32,
        "d_v": 32,
        "dropout": 0.1,
        "attention_dropout": 0.0,
    },
    data={"source_vocab_size": 4000, "max_length": 112, "batch_tokens": 2048},
    train={
        "steps": 8000,
        "warmup_steps": 600,
        "learning_rate_scale": 0.6,
        "checkpoint_every": 500,
        # Parsing the development set takes longer than the training steps between checkpoints.
        "bleu_every": 100,
        "log_every": 100,
    },
    decode={"beam_size": 1, "average_checkpoints": 5},
)
