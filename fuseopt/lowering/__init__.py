"""Arithmetic of ATen's pointwise operations: rules that emit instructions.

A rule takes a `Builder` and the instructions of its operands, in eager's compute type.
It returns the instruction of the result, before rounding to the storage type; None for
a type that it does not cover. `pointwise.RULES` gives the rule of each ATen name.

The formulas come from comparing bits with eager over random data (torch 2.13, AVX2 and
AVX-512). Where eager's compiler contracted a product and a sum, the rule emits `fma`.
Elsewhere it emits `mul` and `add`.
"""
