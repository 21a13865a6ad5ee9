"""Models: reading their files, and running them. What only reads a configuration imports no torch."""
