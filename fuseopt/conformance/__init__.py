"""Compare a compiled step with the plain one bit for bit, repeatably."""
