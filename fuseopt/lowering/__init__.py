"""The arithmetic of ATen's pointwise operations, as functions that write instructions.

A rule takes a `Builder` and the instructions of its operands, already in the type eager
computes in, and returns that of the result, not rounded to the type it is stored in;
None where it does not cover a type. `pointwise.RULES` gives the rule of each ATen name.

The formulas were found by comparing bits with eager over random data (torch 2.13, AVX2
and AVX-512): where eager's compiler contracted a product and a sum, the rule says
`fma`; where it did not, it says `mul` and `add`.
"""
