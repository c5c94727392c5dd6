"""The architectures that the Transformer replaced, and the layer types in Table 1."""
