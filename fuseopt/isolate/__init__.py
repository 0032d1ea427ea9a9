"""One optimizer, its step compiled apart from all others: `fuseopt.compile`."""
