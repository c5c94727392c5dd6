"""Check that a model sets only fields that its architecture uses."""

from transformer_jax.config.sections import ADDED_POSITIONS, ModelConfig
from transformer_jax.config.validation import UsedBy, annotations, part_fields

USED_BY = {
    field: rule.architectures
    for field, (_, rules) in annotations(ModelConfig).items()
    for rule in rules
    if isinstance(rule, UsedBy)
}
# An architecture from outside the package can use every field.
OWN = part_fields(ModelConfig)["architecture"].own


def uses(model: ModelConfig, field: str) -> bool:
    """Return whether the model's architecture uses a field."""
    return model.architecture in USED_BY.get(field, OWN) or model.architecture not in OWN


def unused_defaults(architecture: str) -> dict[str, object]:
    """Return the default value of each field that an architecture does not use."""
    unused = [field for field, users in USED_BY.items() if architecture not in users]
    return {field: getattr(ModelConfig(), field) for field in unused if architecture in OWN}


def check_architecture(model: ModelConfig) -> None:
    """Check that the model sets only fields that its architecture uses."""
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
