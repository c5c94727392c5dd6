"""The architectures that the Transformer replaced."""
