"""Define the function that checks arrays against the shapes in signatures.

The function runs only in tests.
"""

from beartype import BeartypeConf, beartype

# Accept an int where a float is expected, as PEP 484 specifies.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
