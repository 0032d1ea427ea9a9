"""Trace a few lanes of many, prove the others alike, extend the step to all."""
