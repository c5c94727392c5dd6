"""The published Multi30k recipe: image captions, English to German, lowercased and tokenized.

    transformer-jax train configs/multi30k.py --data.folder FOLDER

FOLDER (or $TRANSFORMER_JAX_DATA) must contain multi30k/tok/ with the files from data/task1/tok in
github.com/multi30k/dataset, compressed with gzip.

Wu et al. (ACL 2021) report 41.02 tokenized lowercased BLEU on test_2016_flickr for Transformer-Tiny
trained on text only. With seeds 0, 1, and 2, models trained with this config reached 40.96, 40.75,
and 40.23 BLEU after 6,016, 6,336, and 4,672 steps. Each run took 1.5 to 2.1 hours on two CPU cores
(see experiments/LOG.md).

Differs from the paper: the recipe uses attention biases, a dropout rate of 0.3, gradient clipping,
early stopping, a beam size of 5, and a length penalty with an exponent of 1. The recipe also
changes the peak learning rate, the warmup, Adam's epsilon, and the number of averaged checkpoints.
"""

from transformer_jax.config import Config

CONFIG = Config().change(
    model={
        "num_layers": 4,
        "d_model": 128,
        "d_ff": 256,
        "num_heads": 4,
        "d_k": 32,
        "d_v": 32,
        "dropout": 0.3,
        "attention_bias": True,
        "layer_norm_epsilon": 1e-5,
    },
    data={
        "corpus": "text",
        "train": (
            "multi30k/tok/train.lc.norm.tok.en.gz",
            "multi30k/tok/train.lc.norm.tok.de.gz",
        ),
        "dev": ("multi30k/tok/val.lc.norm.tok.en.gz", "multi30k/tok/val.lc.norm.tok.de.gz"),
        "test": (
            "multi30k/tok/test_2016_flickr.lc.norm.tok.en.gz",
            "multi30k/tok/test_2016_flickr.lc.norm.tok.de.gz",
        ),
        # The published vocabulary, which results from 10,000 BPE merges, has 9,712 tokens.
        "vocab_size": 9712,
        "bleu_tokenizer": "none",
        "batch_tokens": 8192,
        # The runs above used this number of shapes, so 90% of their positions contain tokens.
        "max_batch_shapes": 12,
    },
    train={
        "steps": 8000,
        "warmup_steps": 2000,
        # The learning rate peaks at 0.005 instead of the paper's 1 / sqrt(d_model * warmup_steps).
        "learning_rate_scale": 0.005 * (128 * 2000) ** 0.5,
        "adam_epsilon": 1e-8,
        "clip_norm": 25.0,
        "checkpoint_every": 1,
        "checkpoint_unit": "epoch",
        "bleu_every": 5,
        "patience": 10,
        "log_every": 50,
    },
    decode={
        "beam_size": 5,
        "length_penalty": "power",
        "length_penalty_alpha": 1.0,
        "average_checkpoints": 10,
    },
)
