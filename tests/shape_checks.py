"""Define the function that checks arrays against the shapes in signatures.

It runs only in tests.
"""

from beartype import BeartypeConf, beartype

# Accept an int where a float is expected, as Python does.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
