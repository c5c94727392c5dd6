"""The function that checks the shapes in signatures. It runs only in tests."""

from beartype import BeartypeConf, beartype

# Accept an int for a float, as Python does.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
