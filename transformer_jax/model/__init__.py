"""The paper's architecture and loss (sections 3 and 5.4), as pure functions of the parameters.

The code adds missing axes explicitly before it combines arrays of different ranks, because the
tests set `jax_numpy_rank_promotion` to "raise".
"""
