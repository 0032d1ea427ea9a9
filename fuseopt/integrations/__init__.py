"""One line for each trainer: a module for each package, which its user has.

Nothing of fuseopt imports these modules, and none imports its package before it is
imported itself.
"""
