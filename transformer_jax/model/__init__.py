"""The architecture (section 3 of the paper) and its loss (5.4), as pure functions of parameters.

Operations on arrays of different ranks add the missing axes explicitly, because the tests set
`jax_numpy_rank_promotion` to "raise".
"""
