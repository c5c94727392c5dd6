"""The fields of the model section that each architecture uses.

A field that an architecture does not use must have its default value.
"""

from transformer_jax.config.sections import ADDED_POSITIONS, ModelConfig

TRANSFORMER = ("transformer",)
LAYERED = ("transformer", "conv")
OWN = ("transformer", "rnn", "conv")

USED_BY: dict[str, tuple[str, ...]] = {
    "d_ff": TRANSFORMER,
    "num_heads": TRANSFORMER,
    "num_kv_heads": TRANSFORMER,
    "query_key_norm": TRANSFORMER,
    "d_k": TRANSFORMER,
    "d_v": TRANSFORMER,
    "activation": TRANSFORMER,
    "feed_forward": TRANSFORMER,
    "feed_forward_bias": TRANSFORMER,
    "activation_dropout": TRANSFORMER,
    "num_decoder_layers": TRANSFORMER,
    "output_bias": TRANSFORMER,
    "positions": LAYERED,
    "max_relative_position": TRANSFORMER,
    "position_buckets": TRANSFORMER,
    "attention_implementation": TRANSFORMER,
    "attention_window": TRANSFORMER,
    "attention_bias": TRANSFORMER,
    "norm": TRANSFORMER,
    "layer_norm": TRANSFORMER,
    "layer_norm_epsilon": TRANSFORMER,
    "max_positions": LAYERED,
    "out_of_range_positions": LAYERED,
    "learned_positions_init": LAYERED,
    "remat": TRANSFORMER,
    "rnn_cell": ("rnn",),
    "rnn_input_feeding": ("rnn",),
    "conv_kernel_width": ("conv",),
}
"""The architectures of this package that use each field. They all use the fields that are not
listed, and an architecture from outside the package can use every field."""


def uses(model: ModelConfig, field: str) -> bool:
    """Return whether the model's architecture uses a field."""
    return model.architecture in USED_BY.get(field, OWN) or model.architecture not in OWN


def unused_defaults(architecture: str) -> dict[str, object]:
    """Return the default value of each field that an architecture does not use.

    When you change a config's architecture, reset the fields that the new architecture does not
    use.
    """
    unused = [field for field, users in USED_BY.items() if architecture not in users]
    return {field: getattr(ModelConfig(), field) for field in unused if architecture in OWN}


def check_architecture(model: ModelConfig) -> None:
    """Check that the model sets only fields that its architecture uses.

    Raises:
        ConfigError: a field that the architecture does not use differs from its default, or
            another field has a value that this model does not support.
    """
    defaults = ModelConfig()
    for field, architectures in USED_BY.items():
        default, names = getattr(defaults, field), " and ".join(architectures)
        is_valid = getattr(model, field) == default or uses(model, field)
        use = f"only {names} {'use' if len(architectures) > 1 else 'uses'} it"
        rule = f"{default!r}, the default, with model.architecture {model.architecture} ({use})"
        model.require(field, is_valid, rule)
    if model.architecture == "conv":
        rule = f"{', '.join(ADDED_POSITIONS[:-1])}, or none with model.architecture conv"
        model.require("positions", not model.positions_replace_attention, rule)
    if model.attention_score == "none":
        rule = "False with model.attention_score none (the decoder has no attentional output)"
        model.require("rnn_input_feeding", not model.rnn_input_feeding, rule)
        rule = "0 with model.attention_score none (there are no attention weights)"
        model.require("attention_dropout", model.attention_dropout == 0, rule)
