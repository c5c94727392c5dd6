"""The architectures that the Transformer replaced, and the layer types of Table 1."""
