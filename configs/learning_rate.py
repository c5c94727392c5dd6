"""Multi30k: which peak learning rate and warmup train the small model of an ablation best?

    transformer-jax sweep learning_rate --seeds 1

The model is the base model at `--scale tiny`, and the text is that of configs/multi30k.py. The name
p8_w1000 means a peak learning rate of 0.008 after 1,000 warmup steps.

Differs from the paper: the peak is chosen here instead of 1 / sqrt(d_model warmup_steps).
"""

from configs.base import CONFIG as BASE
from configs.multi30k_small import CONFIG as SMALL
from transformer_jax.config import Config, Row

D_MODEL = 64
TINY = {"num_layers": 3, "d_model": D_MODEL, "d_ff": 256, "d_k": 8, "d_v": 8}


def with_peak(peak: float, warmup_steps: int) -> Config:
    """Return the config whose learning rate is `peak` after `warmup_steps`."""
    return SMALL.change(
        model={**BASE.to_dict()["model"], **TINY},
        train={
            "steps": 2500,
            "warmup_steps": warmup_steps,
            "learning_rate_scale": peak * (D_MODEL * warmup_steps) ** 0.5,
            "checkpoint_every": 500,
            "bleu_every": 1,
            "log_every": 100,
        },
    )


SWEEP = {
    "p4_w500": Row(with_peak(0.004, 500)),
    "p2_w500": Row(with_peak(0.002, 500)),
    "p8_w500": Row(with_peak(0.008, 500)),
    "p8_w1000": Row(with_peak(0.008, 1000)),
    "p16_w1000": Row(with_peak(0.016, 1000)),
}
