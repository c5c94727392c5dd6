"""The checker behind the shapes in signatures: on whenever the tests run, never otherwise."""

from beartype import BeartypeConf, beartype

# An int is a fine float, as everywhere in Python.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
