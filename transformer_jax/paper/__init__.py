"""The tables, figures, and equations of the paper, and the commands that reproduce them."""
