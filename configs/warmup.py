"""Which learning rate and warmup best suit the base model (equation 3)?

    transformer-jax sweep warmup

The row name s2_w1000 means twice the paper's learning rate, with 1,000 warmup steps. The learning
rate peaks at scale / sqrt(d_model * warmup_steps), so a shorter warmup also raises the peak. For a
small model on Multi30k, see configs/learning_rate.py.

The paper reports results only for the settings in the first row. No model has been trained with
this config yet.
"""

from configs.base import CONFIG as BASE

SCALES, WARMUPS = (1.0, 0.5, 2.0), (4000, 1000, 16_000)

SWEEP = {
    f"s{scale:g}_w{warmup_steps}": BASE.change(
        train={"learning_rate_scale": scale, "warmup_steps": warmup_steps}
    )
    for scale in SCALES
    for warmup_steps in WARMUPS
}
