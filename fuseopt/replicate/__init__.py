"""Trace a few lanes of many, prove the other lanes alike, extend the step to all."""
