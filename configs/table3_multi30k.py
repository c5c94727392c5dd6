"""The rows of Table 3 on Multi30k, most of which train in 5 to 16 minutes on one CPU core.

    transformer-jax sweep table3_multi30k --seeds 3 --control

The text is the same as in configs/multi30k.py. $TRANSFORMER_JAX_DATA must be the path to the folder
that contains multi30k/tok/. Compared with the paper's base model, d_model, d_k, and d_v are a
quarter as large, d_ff is an eighth as large, and each stack has a third as many layers. The
numbers of layers are rounded to one in C1 and to three in C3. C2 has no counterpart, because it
would also have one layer. Training makes about six passes over the text. The peak learning rate is
the best one from the sweep in configs/learning_rate.py. docs/ablations.md contains the commands of
two published sweeps with different settings. One sweep tunes the learning rate for each row (four
passes), and the other uses one rate for all rows (seven passes).

Differs from the paper in the model size, the text, the batch size, the number of steps, and the
learning rate. The search settings match Table 3: a beam size of 4, a length penalty with an alpha
of 0.6, and no checkpoint averaging.
"""

from configs.base import CONFIG as PAPER
from configs.multi30k import CONFIG as MULTI30K
from configs.table3 import SWEEP as TABLE3
from transformer_jax.config import Config, Row

D_MODEL = 128
WARMUP_STEPS = 500


def with_peak(peak: float, warmup_steps: int = WARMUP_STEPS) -> Config:
    """Return the base config of this sweep, with a learning rate that peaks at `peak`."""
    return PAPER.change(
        model={"num_layers": 2, "d_model": D_MODEL, "d_ff": 256, "d_k": 16, "d_v": 16},
        data={
            **MULTI30K.to_dict()["data"],
            "vocab_size": 2000,
            "batch_tokens": 1024,
            "max_batch_shapes": None,
            "max_length": 64,
        },
        train={
            "steps": 5000,
            "warmup_steps": warmup_steps,
            "learning_rate_scale": peak * (D_MODEL * warmup_steps) ** 0.5,
            "checkpoint_every": 500,
            "checkpoint_unit": "step",
            "keep_checkpoints": 1,
            "bleu_every": 5,
            "log_every": 100,
        },
        decode={"average_checkpoints": 1},
    )


BASE = with_peak(0.003)

# fmt: off
SWEEP = {
    "base": Row(BASE, TABLE3["base"].paper),
    "A1": Row(BASE.change(model={"num_heads": 1, "d_k": 128, "d_v": 128}), TABLE3["A1"].paper),
    "A2": Row(BASE.change(model={"num_heads": 4, "d_k": 32, "d_v": 32}), TABLE3["A2"].paper),
    "A3": Row(BASE.change(model={"num_heads": 16, "d_k": 8, "d_v": 8}), TABLE3["A3"].paper),
    "A4": Row(BASE.change(model={"num_heads": 32, "d_k": 4, "d_v": 4}), TABLE3["A4"].paper),
    "B1": Row(BASE.change(model={"d_k": 4}), TABLE3["B1"].paper),
    "B2": Row(BASE.change(model={"d_k": 8}), TABLE3["B2"].paper),
    "C1": Row(BASE.change(model={"num_layers": 1}), TABLE3["C1"].paper),
    "C3": Row(BASE.change(model={"num_layers": 3}), TABLE3["C3"].paper),
    "C4": Row(BASE.change(model={"d_model": 64, "d_k": 8, "d_v": 8}), TABLE3["C4"].paper),
    "C5": Row(BASE.change(model={"d_model": 256, "d_k": 32, "d_v": 32}), TABLE3["C5"].paper),
    "C6": Row(BASE.change(model={"d_ff": 128}), TABLE3["C6"].paper),
    "C7": Row(BASE.change(model={"d_ff": 512}), TABLE3["C7"].paper),
    "D1": Row(BASE.change(model={"dropout": 0.0}), TABLE3["D1"].paper),
    "D2": Row(BASE.change(model={"dropout": 0.2}), TABLE3["D2"].paper),
    "D3": Row(BASE.change(train={"label_smoothing": 0.0}), TABLE3["D3"].paper),
    "D4": Row(BASE.change(train={"label_smoothing": 0.2}), TABLE3["D4"].paper),
    "E": Row(BASE.change(model={"positions": "learned"}), TABLE3["E"].paper),
    "big": Row(
        BASE.change(model={"d_model": 256, "d_ff": 512, "num_heads": 16, "dropout": 0.3}),
        TABLE3["big"].paper,
    ),
}
