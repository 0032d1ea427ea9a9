"""Has a compiled step the bits of the plain one? A run that anybody can repeat."""
