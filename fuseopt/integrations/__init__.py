"""One line for each trainer: a module for each package, which its user has.

No other module of fuseopt imports these. Each imports its package only when it is
imported itself.
"""
