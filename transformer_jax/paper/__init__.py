"""The paper's tables, figures, and equations, and the commands that reproduce them."""
