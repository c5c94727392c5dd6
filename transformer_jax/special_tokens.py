"""The four pieces that every vocabulary begins with.

The paper names none. Padding is 0, so that `pieces != PAD` says which places hold tokens; a
sentence ends in EOS on both sides; the decoder begins with BOS.
"""

PAD, BOS, EOS, UNKNOWN = 0, 1, 2, 3
