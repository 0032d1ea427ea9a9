"""Tools for work on fuseopt: none of them is a test, none is part of the package."""
