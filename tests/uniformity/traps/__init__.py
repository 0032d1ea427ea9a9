"""Optimizers whose lanes look alike and are not, at once or later.

Each module is loaded anew for each run, so that a compiled optimizer and its eager twin
share nothing. What a user does between steps is `before(turn, ps)`.
"""
