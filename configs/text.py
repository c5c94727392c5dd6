"""Train on your own parallel text. Each row is for a different amount of text.

    transformer-jax train configs/text.py:10k \
        --data.train train.en train.de --data.dev dev.en dev.de --data.test test.en test.de

The files contain UTF-8 text and can be compressed with gzip, xz, or bzip2. Line n of one file is
the translation of line n in the other file. Choose the row whose number of sentence pairs is
closest to yours. The rows `300`, `10k`, and `100k` train small models on a laptop. The row `base`
trains the paper's base model on millions of pairs, which takes hours on a GPU.
docs/your-own-data.md describes what to expect.

Differs from the paper: training stops early when the perplexity on the development set no longer
improves. The laptop rows use smaller models, more dropout, and different learning rates. Except for
`300`, they also clip gradients.
"""

from transformer_jax.config import Config

TEXT = Config().change(data={"corpus": "text"}, train={"patience": 5})
# With less text, use a smaller model, a smaller vocabulary, and more dropout.
LAPTOP = TEXT.change(
    model={"d_model": 128, "d_ff": 512, "num_heads": 4, "d_k": 32, "d_v": 32, "dropout": 0.3},
    decode={"average_checkpoints": 5},
)

SWEEP = {
    "300": LAPTOP.change(
        model={"num_layers": 2},
        data={"vocab_size": 500, "batch_tokens": 1024},
        train={
            "steps": 500,
            "warmup_steps": 100,
            "learning_rate_scale": 0.3,
            "checkpoint_every": 25,
            "bleu_every": 20,
            "log_every": 25,
        },
    ),
    "10k": LAPTOP.change(
        model={"num_layers": 3},
        data={"vocab_size": 4000, "batch_tokens": 2048},
        train={
            "steps": 4000,
            "warmup_steps": 1000,
            "peak_learning_rate": 0.0028,
            "clip_norm": 1.0,
            "checkpoint_every": 250,
            "bleu_every": 16,
            "log_every": 50,
        },
    ),
    "100k": LAPTOP.change(
        model={"num_layers": 4, "dropout": 0.2},
        data={"vocab_size": 8000, "batch_tokens": 4096},
        train={
            "steps": 10_000,
            "warmup_steps": 2000,
            "peak_learning_rate": 0.002,
            "clip_norm": 1.0,
            "checkpoint_every": 500,
            "bleu_every": 20,
            "log_every": 50,
        },
    ),
    # The paper's vocabulary has 37,000 tokens for 4.5 million sentence pairs.
    "base": TEXT.change(
        data={"vocab_size": 16_000},
        train={"steps": 50_000, "patience": 10},
    ),
}
