"""A small GPT-2, trained by eager and by a compiled step in lockstep."""
