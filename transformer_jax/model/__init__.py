"""The architecture (section 3 of the paper) and its loss (5.4), as pure functions of parameters."""
