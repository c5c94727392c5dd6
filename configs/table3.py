"""All rows of Table 3 in order, with their changes to the base model and their published results.

    transformer-jax params table3
    transformer-jax train table3:A1

The published results are the parameter count in millions and two scores on newstest2013 without
checkpoint averaging: the per-token perplexity and tokenized BLEU.
"""

from configs.base import CONFIG as BASE
from configs.big import CONFIG as BIG
from transformer_jax.config import Paper, Row

# fmt: off
SWEEP = {
    "base": Row(BASE, Paper(perplexity=4.92, bleu=25.8, parameters=65)),
    "A1": Row(BASE.change(model={"num_heads": 1, "d_k": 512, "d_v": 512}), Paper(5.29, 24.9)),
    "A2": Row(BASE.change(model={"num_heads": 4, "d_k": 128, "d_v": 128}), Paper(5.00, 25.5)),
    "A3": Row(BASE.change(model={"num_heads": 16, "d_k": 32, "d_v": 32}), Paper(4.91, 25.8)),
    "A4": Row(BASE.change(model={"num_heads": 32, "d_k": 16, "d_v": 16}), Paper(5.01, 25.4)),
    "B1": Row(BASE.change(model={"d_k": 16}), Paper(5.16, 25.1, 58)),
    "B2": Row(BASE.change(model={"d_k": 32}), Paper(5.01, 25.4, 60)),
    "C1": Row(BASE.change(model={"num_layers": 2}), Paper(6.11, 23.7, 36)),
    "C2": Row(BASE.change(model={"num_layers": 4}), Paper(5.19, 25.3, 50)),
    "C3": Row(BASE.change(model={"num_layers": 8}), Paper(4.88, 25.5, 80)),
    "C4": Row(BASE.change(model={"d_model": 256, "d_k": 32, "d_v": 32}), Paper(5.75, 24.5, 28)),
    "C5": Row(BASE.change(model={"d_model": 1024, "d_k": 128, "d_v": 128}), Paper(4.66, 26.0, 168)),
    "C6": Row(BASE.change(model={"d_ff": 1024}), Paper(5.12, 25.4, 53)),
    "C7": Row(BASE.change(model={"d_ff": 4096}), Paper(4.75, 26.2, 90)),
    "D1": Row(BASE.change(model={"dropout": 0.0}), Paper(5.77, 24.6)),
    "D2": Row(BASE.change(model={"dropout": 0.2}), Paper(4.95, 25.5)),
    "D3": Row(BASE.change(train={"label_smoothing": 0.0}), Paper(4.67, 25.3)),
    "D4": Row(BASE.change(train={"label_smoothing": 0.2}), Paper(5.47, 25.7)),
    "E": Row(BASE.change(model={"positions": "learned"}), Paper(4.92, 25.7)),
    "big": Row(BIG, Paper(4.33, 26.4, 213)),
}
