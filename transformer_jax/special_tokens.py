"""The four special tokens at the start of every vocabulary.

The paper does not define special tokens. `tokens != PAD` masks out padding. Sources and targets end
with EOS, and the decoder's input starts with BOS, or with PAD if `model.decoder_start` is
`padding`.
"""

PAD, BOS, EOS, UNKNOWN = 0, 1, 2, 3
