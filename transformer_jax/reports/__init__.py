"""Tables, statistics, and figures of a sweep."""
