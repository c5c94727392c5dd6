"""Pages and figures, drawn from arrays, tokens, and labels alone."""
