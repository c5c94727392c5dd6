"""The paper's architecture and loss (sections 3 and 5.4), as pure functions of the parameters.

Operations on arrays of different ranks add the missing axes explicitly, because the tests set
`jax_numpy_rank_promotion` to "raise".
"""
