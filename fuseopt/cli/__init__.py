"""The command line: what is installed, what a step becomes, what the cache holds."""
