"""Record what a compiled call depends on, and compare the next call with the record."""
