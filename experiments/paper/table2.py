"""Table 2: the training cost in FLOPs, computed by the paper's method and by counting."""

from dataclasses import dataclass

from transformer_jax.config.loading import load_config, run_name
from transformer_jax.sweeps.estimates import ASSUMED_UTILIZATION, estimate_bytes
from transformer_jax.training.flops import peak_flops, train_flops

# Sustained single-precision FLOP/s of a P100, according to the paper (section 6.1).
P100_FLOPS = 9.5e12
NUM_GPUS = 8


@dataclass(frozen=True)
class Training:
    """A row of Table 2."""

    model: str
    languages: str
    config: str
    """The name of the config, which ships with this package."""
    bleu: float
    """The paper's BLEU score on newstest2014."""
    hours: float
    """The paper's training time on 8 P100 GPUs."""
    text_bytes: float
    """The approximate size of the text, in bytes. The compressed download can be smaller."""

    @property
    def paper_flops(self) -> float:
        """The FLOPs by the paper's method: time x number of GPUs x sustained FLOP/s per GPU."""
        return self.hours * 3600 * NUM_GPUS * P100_FLOPS

    @property
    def counted_flops(self) -> float:
        """FLOPs of the matrix products in all training steps, for full batches."""
        return train_flops(load_config(self.config))

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands that prepare the text, train the model, and score it."""
        return (
            f"transformer-jax prepare {self.config}",
            f"transformer-jax train {self.config}",
            f"transformer-jax evaluate runs/{run_name(self.config)}",
        )


GERMAN, FRENCH = 1.7e9, 15e9
TABLE2 = (
    Training("base", "English-German", "wmt14", 27.3, 12, GERMAN),
    Training("big", "English-German", "wmt14_big", 28.4, 3.5 * 24, GERMAN),
    Training("base", "English-French", "wmt14_fr:base", 38.1, 12, FRENCH),
    Training("big", "English-French", "wmt14_fr:big", 41.8, 3.5 * 24, FRENCH),
)


def estimate_seconds(training: Training) -> float:
    """Estimate the training time in seconds on all local devices."""
    config = load_config(training.config)
    return training.counted_flops / (ASSUMED_UTILIZATION * peak_flops(config.model.dtype))


def estimate_disk(training: Training) -> float:
    """Estimate the size of the text and the checkpoints in bytes."""
    return training.text_bytes + estimate_bytes(load_config(training.config))
