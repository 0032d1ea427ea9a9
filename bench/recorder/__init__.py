"""A spike: record the step of an optimizer without Dynamo (docs/recorder.md).

Nothing in the package imports this. A user cannot switch it on.
"""
