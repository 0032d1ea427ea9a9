"""Intermediate representation of a step: graphs of bodies over lanes, and checks."""
