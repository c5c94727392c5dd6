"""The four special tokens at the start of every vocabulary.

The paper does not define special tokens. The mask of the real tokens is `tokens != PAD`. Sources
and targets end with EOS, and the decoder's input starts with BOS.
"""

PAD, BOS, EOS, UNKNOWN = 0, 1, 2, 3
