"""The four special tokens that begin every vocabulary.

The paper does not define them. PAD is 0, so `tokens != PAD` is True for real tokens. Sources and
targets end with EOS, and the input of the decoder begins with BOS.
"""

PAD, BOS, EOS, UNKNOWN = 0, 1, 2, 3
