"""Tests of fuseopt.tail."""
