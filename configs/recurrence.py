r"""The Transformer compared with recurrent and convolutional models of equal size (section 4).

    transformer-jax sweep recurrence --seeds 3 --control \
        --tune train.peak_learning_rate 0.0015 0.003 0.006 0.012
    transformer-jax evaluate sweeps/recurrence/general/seed-0 --by-length

    transformer-jax sweep recurrence --data-from smoke --train-from smoke

The first two commands need Multi30k, as described in configs/table3_multi30k.py. The last command
is a quick test on number words.

All models have two layers in each stack. The widths are chosen so that each model has 0.91 to 0.92
million parameters. The `none` row is a recurrent model without attention (Sutskever et al. 2014).
The decoder in the `additive` and `general` rows uses input feeding and follows Luong et al. (2015).
These two rows are named after their attention scores. The `conv` row is ConvS2S (Gehring et al.
2017).

Differs from the paper in the architectures, and in the same ways as configs/table3_multi30k.py. For
the recurrent models, the norm of the per-token gradient is clipped at 5, which is a higher limit
than in Sutskever et al. and Luong et al.
"""

from configs.table3_multi30k import BASE
from transformer_jax.config import Config
from transformer_jax.config.architectures import unused_defaults

# This peak is the same as that of BASE, but it does not depend on the width of a row.
# Every checkpoint is scored, to show how long each model takes to reach a given BLEU score.
START = BASE.change(
    train={"peak_learning_rate": 0.003, "learning_rate_scale": 1.0, "bleu_every": 1}
)


def with_architecture(architecture: str, d_model: int, **model: object) -> Config:
    """Return the base config with a new architecture and width."""
    unused = unused_defaults(architecture)
    return START.change(model={**unused, "architecture": architecture, "d_model": d_model, **model})


def recurrent(d_model: int, attention_score: str, *, input_feeding: bool = True) -> Config:
    """Return the config for a recurrent model that is trained with gradient clipping."""
    fields = {"attention_score": attention_score, "rnn_input_feeding": input_feeding}
    return with_architecture("rnn", d_model, **fields).change(train={"clip_norm": 5.0})


SWEEP = {
    "transformer": START,
    "none": recurrent(148, "none", input_feeding=False),
    "additive": recurrent(134, "additive"),
    "general": recurrent(136, "general"),
    "conv": with_architecture("conv", 148),
}
